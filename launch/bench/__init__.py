"""`polopt bench`: comparisons with other libraries, on control tasks and on language models."""

"""Every record of the reference values, mapped to a computation of ours."""

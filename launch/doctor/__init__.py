"""The doctor: reads what a run logged, of ours or of others, and says what is wrong with it.

Readers (`readers`) turn a file or folder into one `Log` per run, with metrics and settings under
the names of `aliases.tsv` and `settings.tsv`. The rules of `rules.yaml` and `checklist.yaml` are
tests of a `Log` (`examine`, `predicates`); `diagnose` tries all of them, folds symptoms under their
cause and ranks what is left.
"""

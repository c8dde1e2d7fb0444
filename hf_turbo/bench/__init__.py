"""`hf-turbo bench`: one model unpatched and patched in one run, its text checked before its speed is told.

`cases` says what to run, `presets` and `models` on what, `measure` times calls of `generate()`, `judge` checks texts
by the rule in `promise`, `run` puts these together, and `rows`, `table` and `plot` show what came out.

`--kv` compares formats of the cache: `kv` runs `run` and `kv_quality` for each, `kv_table` and `kv_plot` show them.
"""

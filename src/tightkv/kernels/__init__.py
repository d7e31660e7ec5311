"""append and attend, in several implementations; `registry` says which of them runs where."""

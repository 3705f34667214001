"""The parts of `pagemill why`: reading and showing the records of scaling decisions.

`sources` reads them from a running `pagemill up` or a file, `cluster` from a cluster; `replaying` repeats the
decisions, and `table` formats them.
"""

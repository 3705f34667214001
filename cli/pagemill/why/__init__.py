"""The parts of `pagemill why`: where records of scaling decisions are found, and how they are shown.

`sources` reads them from a running `pagemill up`, a cluster or a file; `cluster` knows how a cluster is asked;
`replaying` decides them again; `table` puts them into words.
"""

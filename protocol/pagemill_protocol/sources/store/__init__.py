"""Models on a disk that several processes share: filled once, checked, kept by last use.

`folder` is one model's folder while it is filled and after, `record` what lies in it, `fetch` fills it from a
repository, `cache` keeps many within a limit.
"""

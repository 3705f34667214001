"""Models on a disk that several processes share: fetched once, checked, evicted by last use.

`folder` is one model's folder during and after the fetch, `record` describes its contents, `fetch` fills it from a
repository, `cache` keeps many models within a limit.
"""

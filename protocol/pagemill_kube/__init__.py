"""The API server of a cluster: credentials, single requests, server-side apply, lists and watches.

The gateway watches with it; operator and command line read and write with it. It knows no kind of object: paths come
from the callers. The operator's own watches are kopf's (ADR 13), over a session with the same credentials.
"""

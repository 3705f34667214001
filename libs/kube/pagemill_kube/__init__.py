"""The client of a cluster's API server: credentials, single requests, server-side apply, lists and watches.

The gateway watches with it; operator and command line read and write with it. It knows no kinds of objects: callers
give the paths. The operator's own watches are kopf's (ADR 13), over a session with the same credentials.
"""

"""Answer formats: how models write reasoning and tool calls, one parser a format. `registry` lists and detects them.

Text in, events out; no tokens, sockets or requests. Dialects render the events, `pagemill_engine.output` feeds text.
"""

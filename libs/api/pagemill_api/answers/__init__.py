"""Answer formats: how models write reasoning and tool calls, with one parser per format.

`registry` lists and detects formats. Parsers turn text into events and use no tokens, sockets or requests. Dialects
render the events; `pagemill_engine.output` feeds the text.
"""

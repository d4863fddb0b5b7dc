"""Makes answers follow a schema, a regular expression or a grammar.

`Compiler` turns a `Constraint` into the mask of one answer. There are four languages: JSON Schema, regular expressions
and Lark grammars are run by llguidance; GBNF is run by llama.cpp's grammar code, after a trial in a process of its own
(`Trial`). Nothing here uses HTTP, Redis or an event loop. Compiling blocks: call the compiler on another thread.
"""

"""Rules for interpreting requests that deviate from the four APIs.

A request goes through these steps before it reaches a handler. Each module holds the rules for one step:

1. `paths`: the path of the request.
2. `body`: the bytes of the body, which are parsed as JSON.
3. `values`: field values that other languages and servers serialise differently, and unknown fields that must
   not be ignored.

The other modules hold the rules for single fields: `content` for content parts, `tools` for tools and tool
choices, and `constraints` for answer formats.

Where the meaning is unambiguous, the server does what the client means. Otherwise, the error states the field
and its value, and says what to do. `tests/server/test_leniency.py` has a row for each rule.
"""

"""The OpenAI API: its requests as typed structs (``schema``), and what the engine's deltas are written as, one module an endpoint.

Nothing here knows HTTP; ``http_api`` carries what these modules read and write.
"""

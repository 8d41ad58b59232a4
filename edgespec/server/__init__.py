"""The HTTP server, which provides edgespec's models through the APIs of OpenAI, Anthropic and Ollama.

A request passes through these modules:

1. `http_server.py` runs uvicorn with limits for slow clients, and stops gracefully.
2. `security.py` checks the Host and Origin headers and the API key.
3. `endpoint.py` reads the body, validates it against the endpoint's pydantic model, and calls the
   endpoint's handler. If the client disconnects, the handler and its replies are cancelled.
4. The handler translates the request into `GenerationRequest`s, enters `Service.generate`, and turns the
   events of the `Generation` into JSON or an event stream. For APIs whose streams consist of named events,
   `reply_builder.py` does this.
5. `models.py` lends the loaded model. `generation.py` reads the replies of the model's `RequestQueue`.

To add an API, write a package next to `openai`:

- For each endpoint, a pydantic request model derived from `RequestFields`, a `TypedDict` for its responses,
  and an async handler with the decorator `endpoint`, which receives a `Call` and returns a `Response`.
- A `Protocol` record with the path prefix, the endpoints, and a function that formats errors as the
  API's clients expect. Add the record to `_PROTOCOLS` in `app.py`.

The OpenAPI description, error formats, limits and cancellation follow from the record. All server code runs
in one asyncio event loop. Only `ModelPool` (loading models) and `Generation` (reading replies) use other
threads.
"""

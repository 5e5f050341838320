"""GET /docs: the API's description as one page, made from openapi.json, that loads nothing."""

from __future__ import annotations

from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

PATHS = ("/docs", "/openapi.json")
"""Open without a token: they say nothing of a deployment."""

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { margin-top: 2.5rem; font-family: ui-monospace, monospace; font-size: 1.1rem }
table { border-collapse: collapse; width: 100% }
td, th { border-bottom: 1px solid #8884; padding: .3rem .6rem; text-align: left;
         vertical-align: top; overflow-wrap: anywhere }
code { font-family: ui-monospace, monospace }
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def add_to(app: FastAPI) -> None:
    """Serve the page at /docs."""

    @cache
    def page() -> str:
        return render(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page(), headers=_HEADERS)


def render(api: dict[str, Any]) -> str:
    """The page of an OpenAPI description."""
    schemas = api.get("components", {}).get("schemas", {})
    parts = [f"<h1>{escape(api['info']['title'])} {escape(api['info']['version'])}</h1>"]
    parts.append(f"<p>{escape(api['info'].get('description', ''))}</p>")
    parts.append('<p>The same for programs: <a href="openapi.json">openapi.json</a></p>')
    used: list[str] = []
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}</p>")
            body = _json_schema(operation.get("requestBody", {}))
            if body is not None:
                parts.append(f"<p>Body: {_type(body, used)}</p>")
            for status, answer in operation.get("responses", {}).items():
                found = _json_schema(answer)
                what = escape(answer.get("description", "")) if found is None else ""
                what = what or _type(found or {}, used)
                parts.append(f"<p>{escape(status)}: {what}</p>")
    parts.extend(_object(name, schemas[name], used) for name in used)  # which grows meanwhile
    body = "\n".join(parts)
    title = escape(api["info"]["title"])
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _json_schema(content: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (
        content.get("content", {}).get("application/json", {}).get("schema")
    )
    return found


def _object(name: str, schema: dict[str, Any], used: list[str]) -> str:
    rows = []
    for key, value in schema.get("properties", {}).items():
        needed = " (required)" if key in schema.get("required", ()) else ""
        text = escape(value.get("description", ""))
        rows.append(
            f"<tr><td><code>{escape(key)}</code>{needed}</td><td>{_type(value, used)}</td>"
            f"<td>{text}</td></tr>"
        )
    about = escape(schema.get("description", ""))
    return (
        f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{about}</p>'
        f"<table><tr><th>key</th><th>value</th><th></th></tr>{''.join(rows)}</table>"
    )


def _type(schema: dict[str, Any], used: list[str]) -> str:
    """A schema in a few words, with links to the objects that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in used:
            used.append(name)
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = [_type(each, used) for each in schema[key] if each != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), used)}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "at least"), ("maximum", "at most"))
        if key in schema
    ]
    return escape(", ".join([str(schema.get("type", "anything")), *bounds]))

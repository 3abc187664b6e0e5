"""Serves a plain function as an agent: `agent.py` with `def invoke(input, context)`.

The function may be plain, async, a generator or an async generator; a generator streams. Standard
library only, and few of its modules, so that an instance starts as fast as its interpreter.
"""

import _thread
import io
import json
import os
import socket
import sys

LINE_MAX = 16384  # characters that wait for the end of their line


class Lines(io.TextIOWrapper):
    """Passes on whole lines: `print` writes one in parts, and those of calls at once would mix."""

    def __init__(self, stream):
        super().__init__(stream.buffer, stream.encoding, stream.errors, write_through=True)
        self._own = _thread._local()

    def write(self, text):
        begun = getattr(self._own, "begun", "") + text
        lines, end, rest = begun.rpartition("\n")
        if len(rest) > LINE_MAX:
            lines, end, rest = begun, "", ""
        self._own.begun = rest
        if lines or end:
            super().write(lines + end)
        return len(text)

    def flush(self):
        begun, self._own.begun = getattr(self._own, "begun", ""), ""
        if begun:
            super().write(begun)
        super().flush()


OUTPUTS = sys.stdout, sys.stderr = Lines(sys.stdout), Lines(sys.stderr)
sys.path.insert(0, os.getcwd())
import agent  # noqa: E402  (the user's file)

LOOP = None
LOOP_LOCK = _thread.allocate_lock()
RUNNING = {}  # request id -> (function that asks it to end, lock held until it has ended)
CANCEL_WAIT = 8  # seconds
GENERATOR = 0x20
COROUTINE = 0x80
ASYNC_GENERATOR = 0x200


def flags_of(function):
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(getattr(function, "__call__", None), "__code__", None)
    return code.co_flags if code else 0


def loop():
    global LOOP
    with LOOP_LOCK:
        if LOOP is None:
            import asyncio

            LOOP = asyncio.new_event_loop()
            _thread.start_new_thread(LOOP.run_forever, ())
    return LOOP


def run_async(coroutine, request_id):
    import asyncio

    task = []

    async def tracked():
        task.append(asyncio.current_task())
        return await coroutine

    future = asyncio.run_coroutine_threadsafe(tracked(), loop())
    # The task is canceled, not the future: the future ends when the coroutine really has.
    stoppable(request_id, lambda: task and LOOP.call_soon_threadsafe(task[0].cancel))
    return future.result()


def stoppable(request_id, stop):
    known = RUNNING.get(request_id)
    if known is not None:
        known[0] = stop


def items(result, request_id):
    if hasattr(result, "__anext__"):
        while True:
            try:
                yield run_async(result.__anext__(), request_id)
            except StopAsyncIteration:
                return
    stopped = []
    stoppable(request_id, lambda: stopped.append(True))
    for item in result:
        if stopped:
            return
        yield item


def log(level, message, **fields):
    print(json.dumps({"level": level, "msg": message, **fields}), flush=True)


def send_json(connection, status, value, close=False):
    body = json.dumps(value, ensure_ascii=False).encode()
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}
    head = "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (
        status,
        reason.get(status, ""),
        len(body),
    )
    if close:
        head += "Connection: close\r\n"
    connection.sendall(head.encode() + b"\r\n" + body)


def send_chunk(connection, data):
    connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))


def send_event(connection, event):
    send_chunk(connection, b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")


def stream(connection, result, request_id):
    connection.sendall(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        b"Cache-Control: no-store\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    usage = {}
    try:
        for item in items(result, request_id):
            if isinstance(item, str):
                send_event(connection, {"type": "chunk", "content": item})
            elif isinstance(item, dict) and item.get("type") in ("chunk", "custom"):
                send_event(connection, item)
            elif isinstance(item, dict) and set(item) == {"usage"}:
                usage = item["usage"]
            else:
                text = json.dumps(item, ensure_ascii=False)
                send_event(connection, {"type": "chunk", "content": text})
        send_event(connection, {"type": "done", "usage": usage})
    except OSError:
        raise
    except BaseException as error:
        report(error, request_id)
        send_event(connection, {"type": "error", "code": type(error).__name__, "message": str(error)})
    connection.sendall(b"0\r\n\r\n")


def report(error, request_id):
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    log("error", text.rstrip(), request_id=request_id)


def answer(connection, body):
    try:
        call = json.loads(body)
        argument, context = call["input"], call["context"]
    except (ValueError, KeyError, TypeError) as error:
        send_json(connection, 400, {"error": "not an invocation: %s" % error})
        return
    request_id = context.get("request_id")
    ended = _thread.allocate_lock()
    ended.acquire()
    RUNNING[request_id] = [None, ended]
    try:
        flags = flags_of(agent.invoke)
        result = agent.invoke(argument, context)
        if flags & (GENERATOR | ASYNC_GENERATOR) or hasattr(result, "__next__"):
            stream(connection, result, request_id)
            return
        if flags & COROUTINE or hasattr(result, "__await__"):
            result = run_async(result, request_id)
        whole = isinstance(result, dict) and "output" in result and set(result) <= {"output", "usage"}
        send_json(connection, 200, result if whole else {"output": result})
    except OSError:
        raise
    except BaseException as error:
        if type(error).__name__ != "CancelledError":
            report(error, request_id)
        send_json(connection, 500, {"error": type(error).__name__, "message": str(error)})
    finally:
        for output in OUTPUTS:
            output.flush()
        RUNNING.pop(request_id, None)
        ended.release()


def cancel(connection, body):
    try:
        request_id = json.loads(body)["request_id"]
    except (ValueError, KeyError, TypeError):
        request_id = None
    stop, ended = RUNNING.get(request_id) or (None, None)
    if stop is not None:
        stop()
        # Canceled is said when the call has ended, not when it was asked to.
        if ended.acquire(timeout=CANCEL_WAIT):
            ended.release()
            send_json(connection, 200, {"canceled": True})
            return
    send_json(connection, 404, {"canceled": False})


def read_request(reader):
    line = reader.readline(65537)
    if not line:
        return None
    method, path = line.split(b" ", 2)[:2]
    length = 0
    while True:
        header = reader.readline(65537)
        if header in (b"\r\n", b"\n", b""):
            break
        name, _, value = header.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return method, path.split(b"?", 1)[0].decode("latin-1"), reader.read(length)


def serve(connection):
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader = connection.makefile("rb", 65536)
        while True:
            request = read_request(reader)
            if request is None:
                return
            method, path, body = request
            if path == "/health":
                send_json(connection, 200, {"status": "ok"})
            elif method == b"POST" and path == "/invoke":
                answer(connection, body)
            elif method == b"POST" and path == "/invoke/cancel":
                cancel(connection, body)
            else:
                send_json(connection, 404, {"error": "no such path"})
    except (OSError, ValueError, IndexError):
        pass
    finally:
        connection.close()


def main():
    if not callable(getattr(agent, "invoke", None)):
        sys.exit("agent.py has no function `invoke(input, context)`")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((os.environ.get("ROOST_BIND", "127.0.0.1"), int(os.environ["PORT"])))
    listener.listen(1024)
    while True:
        connection, _ = listener.accept()
        _thread.start_new_thread(serve, (connection,))


main()

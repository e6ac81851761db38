"""amqp.py PORT DIR: sends messages through a queue of a broker, over two connections, and compares."""
import os
import sys
import threading
import time

import pika

from common import Load, check, digest

port, dir = int(sys.argv[1]), sys.argv[2]


def channel():
    for _ in range(300):
        try:
            c = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
            return c.channel()
        except pika.exceptions.AMQPConnectionError:  # it listens before it serves
            time.sleep(0.1)
    raise SystemExit("no broker")


out = channel()
out.queue_declare("noise")
load, received = Load(dir), 0


def receive():
    global received
    c = channel()
    c.basic_qos(prefetch_count=10)
    for method, _, body in c.consume("noise"):
        c.basic_ack(method.delivery_tag)
        if body == b"end":
            c.connection.close()
            return
        check(digest(body[32:]) == body[:32])
        received += 1


receiver = threading.Thread(target=receive)
receiver.start()
sent = 0
sizes = [10, 1000, 100_000, 500, 2000, 50_000, 100]
while not load.over():
    body = os.urandom(sizes[sent % len(sizes)])
    out.basic_publish("", "noise", digest(body) + body)
    sent += 1
    while sent - received > 20 and receiver.is_alive():
        time.sleep(0.0005)
out.basic_publish("", "noise", b"end")
receiver.join()
check(sent == received)
load.done(sent, "messages/s")

"""A verbs ping-pong of two ends whose number of retries can be chosen, which no packaged program offers
without RDMA-CM.

    verbs.py serve DEVICE GID_INDEX RETRIES               prints "port N", serves one peer
    verbs.py connect DEVICE GID_INDEX RETRIES HOST PORT

Both play until a completion has an error; they print "rounds N" now and then, and at the end
"status N" (12: the retries are over) and exit with success. The ends find each other by TCP.
"""
import json
import os
import random
import socket
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SIZE = 64


class End:
    def __init__(self, device, gid_index):
        self.index = gid_index
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.channel = CompChannel(self.context)
        self.cq = CQ(self.context, 16, None, self.channel, 0)
        self.cq.req_notify()
        self.mr = MR(self.pd, 2 * SIZE, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=4, max_recv_wr=4)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))
        self.psn = random.getrandbits(24)
        gid = self.context.query_gid(1, gid_index).gid
        self.name = {"qpn": self.qp.qp_num, "psn": self.psn, "gid": gid}

    def connect(self, peer, retries):
        attr = QPAttr(port_num=1)
        attr.path_mtu = e.IBV_MTU_1024
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qpn"], peer["psn"], self.psn
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout = 12, 14
        attr.retry_cnt, attr.rnr_retry = retries, 7
        route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=self.index)
        attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rts(attr)

    def receive(self):
        piece = SGE(self.mr.buf, SIZE, self.mr.lkey)
        self.qp.post_recv(RecvWR(wr_id=1, num_sge=1, sg=[piece]))

    def send(self):
        piece = SGE(self.mr.buf + SIZE, SIZE, self.mr.lkey)
        self.qp.post_send(SendWR(wr_id=2, opcode=e.IBV_WR_SEND, num_sge=1, sg=[piece]))

    def completions(self):
        """Sleeps until there are some."""
        while True:
            n, done = self.cq.poll(16)
            if n:
                return done
            self.channel.get_cq_event(self.cq)
            self.cq.ack_events(1)
            self.cq.req_notify()
            n, done = self.cq.poll(16)
            if n:
                return done


def play(end, first):
    end.receive()
    yield
    rounds, told = 0, 0
    # Whose turn it is to send is who has received since it sent, and has that acknowledged.
    received, sent = False, not first
    if first:
        end.send()
    while True:
        for c in end.completions():
            if c.status != e.IBV_WC_SUCCESS:
                print("rounds", rounds)
                print("status", c.status, flush=True)
                return
            if c.wr_id == 1:
                received = True
            else:
                sent = True
        if received and sent:
            received = sent = False
            end.receive()
            end.send()
            rounds += 1
            if time.monotonic() - told > 0.1:
                told = time.monotonic()
                print("rounds", rounds, flush=True)


def main():
    role, device, index, retries = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    end = End(device, index)
    if role == "serve":
        listener = socket.create_server(("", 0))
        print("port", listener.getsockname()[1], flush=True)
        tcp = listener.accept()[0]
    else:
        tcp = socket.create_connection((sys.argv[5], int(sys.argv[6])))
    lines = tcp.makefile("rw")

    def exchange(what):
        print(json.dumps(what), file=lines, flush=True)
        return json.loads(lines.readline())

    end.connect(exchange(end.name), retries)
    game = play(end, role == "connect")
    next(game)
    exchange("ready")  # the peer has posted its receive
    next(game, None)
    # Verbs objects must be closed in order; the kernel does it.
    os._exit(0)


main()

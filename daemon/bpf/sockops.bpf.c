// SPDX-License-Identifier: Apache-2.0
//
// Records, per socket and connection, the first sequence numbers of both directions when the
// handshake ends. They are what the two ends of a TCP connection share whatever NAT does to
// addresses; the daemon compares them (src/proof.rs).
//
// A socket restored by TCP_REPAIR chooses its own numbers; its "handshake" has no packet, and it
// gets no record.

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

struct record {
	__u32 snd;
	__u32 rcv;
	__u64 at_ns;
	__u32 role; /* 1: active (connect), 2: passive (accept) */
	__u32 layout;
};

/* Lives and dies with the socket. */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct record);
} records SEC(".maps");

/* With a version in its name (src/pairing/bpf.rs): each change of the program gets another one. */
SEC("sockops")
int underpass_2(struct bpf_sock_ops *ctx)
{
	__u32 op = ctx->op;
	struct bpf_sock *sk;
	struct record *r;

	if (op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB &&
	    op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		return 1;
	sk = ctx->sk;
	if (!sk)
		return 1;
	if (ctx->skb_len == 0) {
		/* A reused socket must not keep the record of the connection before. */
		bpf_sk_storage_delete(&records, sk);
		return 1;
	}
	r = bpf_sk_storage_get(&records, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!r)
		return 1;
	if (op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB) {
		/* bytes_acked has counted the SYN, and data that went with it. */
		r->snd = ctx->snd_una - (__u32)ctx->bytes_acked + 1;
		r->role = 1;
	} else {
		r->snd = ctx->snd_una;
		r->role = 2;
	}
	r->rcv = ctx->rcv_nxt - (__u32)ctx->bytes_received;
	r->at_ns = bpf_ktime_get_ns();
	r->layout = 1;
	return 1;
}

char LICENSE[] SEC("license") = "Apache-2.0";

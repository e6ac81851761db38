/* Random calls on a connection whose both ends this program holds: what each says goes to a file.
 *
 *     calls FIRST COUNT OUT [tame]     seeds FIRST to FIRST+COUNT-1; tame: for connections that are sent down and up
 *
 * The same seed makes the same calls bare and under the shim, so that the transcripts must be equal. There is one
 * thread, and after each call it waits until what was sent, an end or a reset has arrived (`settle`, by inlined
 * system calls, which no shim sees), so that the kernel's answers are determined. Not compared are:
 *   - how much a send that may not wait takes, with more than a page under way: further calls send the rest
 *   - POLLOUT while so much is under way
 *   - how many bytes one `splice` moves: the kernel's count depends on segments
 *   - what is refused, or moves nothing, while an error waits: it may be told before
 *   - some bytes that are unread when the connection leaves its lane: see `may_leave`
 *   - a send whose buffer ends in bad memory (limit 15), and a receive that fits in part
 *   - what SIOCOUTQ says, which depends on acknowledgements; the time that `recvmmsg` leaves
 *   - how much a peek finds, and FIONREAD, where switches come at any time: only that it finds something
 *   - how much one receive finds behind a switch: what it left is received by further calls
 *   - what a send with odd flags says while an error waits
 *   - the error that `recvmmsg` leaves for later when its second message is bad
 * A connection leaves its lane for good with some of the calls; these are rare, so that others come before.
 */
#include "calls.h"

/* ---- sending ---- */

/* What may not wait may take a part. */
static void rest(int k, long n, long flags) {
    struct end *a = &ends[k], *b = &ends[!k];
    if (!(a->nonblock || a->hasty || flags & MSG_DONTWAIT) || b->unread + n <= PAGE) return;
    if (r < 0 ? e != EAGAIN : r >= n) return;
    long done = r < 0 ? 0 : r;
    while (done < n) {
        struct pollfd p = {a->fd, POLLOUT, 0};
        poll(&p, 1, 1000);
        long got = send(a->fd, area + done, n - done, MSG_NOSIGNAL);
        if (got < 0 && errno != EAGAIN) break;
        done += got > 0 ? got : 0;
    }
    r = done;
}

/* Urgent data: up to the mark, and all that is there, for where a receive ends depends on segments. */
static void drain(int k) {
    struct end *a = &ends[k];
    int n = 0, all = 0;
    if (a->closed) return;
    settle();
    DO(ioctl(a->fd, SIOCATMARK, &n));
    told(k, "at mark %d", n);
    DO(recv(a->fd, area, 1, MSG_OOB));
    told(k, "urgent");
    while ((n = recv(a->fd, area, AREA, MSG_DONTWAIT)) > 0) all += n;
    DO(n);
    told(k, "drained %d", all);
    taken(k, a->unread);
}

static void send_some(int k) {
    struct end *a = &ends[k];
    long n = amount(k), flags = send_flags(k);
    struct iovec v[VECS];
    fill(k, area, n);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = 9};
    int how = any(7);
    if (flags & MSG_OOB && (ends[!k].unread || ends[!k].closed)) flags = 0;
    foreign |= !!(flags & MSG_OOB);
    switch (how) {
    case 0: BY(write, SYS_write, a->fd, area, n), flags = 0; break;
    case 1: BY(writev, SYS_writev, a->fd, v, pieces(v, area, n)), flags = 0; break;
    case 2: {
        void *where = any(2) ? &to : NULL;
        BY(sendto, SYS_sendto, a->fd, area, n, flags, where, where ? sizeof to : any(2) * 3);
        break;
    }
    case 3: {
        struct msghdr m = {.msg_iov = v, .msg_iovlen = pieces(v, area, n)};
        if (any(3) == 0) m.msg_name = &to, m.msg_namelen = sizeof to;
        BY(sendmsg, SYS_sendmsg, a->fd, &m, flags);
        break;
    }
    case 4: DO(pwritev2(a->fd, v, pieces(v, area, n), -1, 0)), flags = 0; break;
    default: DO(by_number ? syscall(SYS_sendto, a->fd, area, n, flags, NULL, 0) : send(a->fd, area, n, flags));
    }
    rest(k, n, flags);
    told(k, "send%d %ld %lx", how, n, flags);
    sent(k, r);
    if (flags & MSG_OOB && r > 0) drain(!k);
}

static void send_many(int k) {
    struct end *a = &ends[k];
    struct mmsghdr m[5] = {0};
    struct iovec v[5][VECS];
    int count = any(6);
    long flags = ONE_OF(0, MSG_NOSIGNAL, MSG_DONTWAIT, MSG_MORE | MSG_NOSIGNAL), all = 0;
    fill(k, area, AREA);
    for (int j = 0; j < count; j++) {
        long n = ONE_OF(0, 1, 50, 200);
        if (ends[!k].unread + all + n > PAGE) n = 0;
        m[j].msg_hdr = (struct msghdr){.msg_iov = v[j], .msg_iovlen = pieces(v[j], area + all, n)};
        all += n;
    }
    BY(sendmmsg, SYS_sendmmsg, a->fd, m, count, flags);
    for (int j = 0; j < r; j++) note(" %u", m[j].msg_len), sent(k, m[j].msg_len);
    told(k, "sendmmsg %d %ld %lx", count, all, flags);
}

/* ---- receiving ---- */

static void receive_some(int k) {
    struct end *a = &ends[k];
    long n = ONE_OF(0, 1, 3, 20, 500, 3000, 8000, AREA), flags = receive_flags(k);
    struct iovec v[VECS];
    struct sockaddr_in who;
    socklen_t len = any(3) ? sizeof who : 0;
    int how = any(7);
    memset(area, 0, AREA);
    switch (how) {
    case 0: BY(read, SYS_read, a->fd, area, n), flags = 0; break;
    case 1: BY(readv, SYS_readv, a->fd, v, pieces(v, area, n)), flags = 0; break;
    case 2: {
        int given = any(2);
        BY(recvfrom, SYS_recvfrom, a->fd, area, n, flags, given ? (void *)&who : NULL, given || any(2) ? &len : NULL);
        note(" len %u", len);
        break;
    }
    case 3: {
        char control[64];
        struct msghdr m = {.msg_iov = v, .msg_iovlen = pieces(v, area, n), .msg_flags = 0x55};
        if (any(2)) m.msg_name = &who, m.msg_namelen = sizeof who;
        if (any(2)) m.msg_control = control, m.msg_controllen = sizeof control;
        BY(recvmsg, SYS_recvmsg, a->fd, &m, flags);
        note(" name %u control %zu flags %x iov %zu", m.msg_namelen, m.msg_controllen, m.msg_flags, m.msg_iovlen);
        break;
    }
    case 4: DO(preadv2(a->fd, v, pieces(v, area, n), -1, 0)), flags = 0; break;
    default: DO(by_number ? syscall(SYS_recvfrom, a->fd, area, n, flags, NULL, NULL) : recv(a->fd, area, n, flags));
    }
    behind(k, n, flags);
    got(k, flags);
    told(k, "recv%d %ld %lx", how, n, flags);
}

static void receive_many(int k) {
    struct end *a = &ends[k];
    struct mmsghdr m[5] = {0};
    struct iovec v[5][VECS];
    struct timespec t = {ONE_OF(0, 0, 0, 5, -1), ONE_OF(0, 1, 100, 1000000000)};
    int count = any(6);
    long flags = ONE_OF(0, MSG_DONTWAIT, MSG_WAITFORONE, MSG_PEEK, MSG_WAITALL, MSG_TRUNC | MSG_DONTWAIT), n = any(200);
    memset(area, 0, AREA);
    for (int j = 0; j < count; j++)
        m[j].msg_hdr = (struct msghdr){.msg_iov = v[j], .msg_iovlen = pieces(v[j], area + 1000 * j, n)};
    struct timespec *limit = any(2) && (t.tv_sec != 0 || t.tv_nsec == 1000000000 || t.tv_nsec == 0) ? &t : NULL;
    BY(recvmmsg, SYS_recvmmsg, a->fd, m, count, flags, limit);
    long all = 0, most = count * n < ends[k].unread ? count * n : ends[k].unread;
    for (int j = 0; j < r; j++) {
        long len = m[j].msg_len;
        if (!(foreign || flags & MSG_TRUNC || is_next(k, area + 1000 * j, len))) note(" not the stream");
        if (!(flags & MSG_PEEK)) taken(k, len), all += len;
        else if (!tame) note(" %ld", len);
    }
    if (r > 0 && !(flags & MSG_PEEK)) { /* as `behind` */
        for (long got; all < most && (got = recv(a->fd, area, most - all, MSG_DONTWAIT)) > 0; all += got) taken(k, got);
        note(" %ld", all);
        r = 1;
    }
    told(k, "recvmmsg %d %ld %lx %d", count, n, flags, limit ? (int)t.tv_sec : 9);
}

/* ---- calls that take the connection from its lane ---- */

static void moved(int k) {
    struct end *a = &ends[k];
    if (!may_leave(k)) return;
    struct iovec v[VECS];
    long n = ONE_OF(0, 1, 50, 400), offset = ONE_OF(-1, -1, -1, 0, 5);
    int flags = ONE_OF(0, 0, RWF_NOWAIT, RWF_HIPRI, RWF_APPEND, RWF_SYNC, 0x4000);
    loff_t at = 3, *p = any(4) ? NULL : &at;
    char line[600];
    switch (any(11)) {
    case 0:
        DO(preadv2(a->fd, v, pieces(v, area, n), offset, flags)), got(k, 0);
        return told(k, "preadv2 %ld %ld %x", n, offset, flags);
    case 1:
        fill(k, area, n);
        DO(pwritev2(a->fd, v, pieces(v, area, n), offset, flags)), sent(k, r);
        return told(k, "pwritev2 %ld %ld %x", n, offset, flags);
    case 2: { /* into a pipe, and out of it */
        long all = 0;
        do {
            BY(splice, SYS_splice, a->fd, p, pipes[1], NULL, n - all, SPLICE_F_NONBLOCK | SPLICE_F_MOVE);
            if (r > 0) need(read(pipes[0], area + all, r) == r, "pipe"), all += r;
        } while (r > 0 && all < n);
        if (all) r = all;
        got(k, 0);
        return told(k, "splice in %ld %d", n, !!p);
    }
    case 3: {
        long all = 0;
        fill(k, area, n);
        need(write(pipes[1], area, n) == n, "pipe");
        do {
            BY(splice, SYS_splice, pipes[0], NULL, a->fd, p, n - all, ONE_OF(0, SPLICE_F_MORE));
            if (r > 0) all += r;
        } while (r > 0 && all < n);
        if (all) r = all;
        while (n > all) all += read(pipes[0], text, n - all);
        sent(k, r);
        return told(k, "splice out %ld %d", n, !!p);
    }
    case 4: foreign = 1, DO(dprintf(a->fd, "%d and %s\n", step, "more")), sent(k, r); return told(k, "dprintf");
    case 5: {
        FILE *f = fdopen(dup(a->fd), "r+");
        need(!!f, "fdopen");
        foreign = 1;
        DO(fprintf(f, "line %d\n", step));
        int flushed = fflush(f);
        if (!flushed) sent(k, r);
        note(" flush %d %d", flushed, flushed ? errno : 0);
        settle();
        long before = ends[k].unread;
        if (before > 0 && before < 600) {
            setvbuf(f, NULL, _IONBF, 0);
            char *l = fgets(line, before + 1 < 20 ? (int)before + 1 : 20, f);
            if (l) note(" %08x", hash(line, strlen(line))), taken(k, strlen(line));
        }
        DO(fclose(f));
        return told(k, "stdio");
    }
    case 6: {
        int low = ONE_OF(0, 1, 5, 1000, -1);
        DO(setsockopt(a->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low));
        return told(k, "lowat %d", low);
    }
    case 7: {
        int off = ONE_OF(-1, 0, 3);
        if (off >= 0) foreign = 1; /* what a peek finds is not looked at any more */
        DO(setsockopt(a->fd, SOL_SOCKET, SO_PEEK_OFF, &off, sizeof off));
        return told(k, "peek_off %d", off);
    }
    case 8: { /* control data */
        char control[CMSG_SPACE(4)] __attribute__((aligned(8))) = {0};
        struct msghdr m = {.msg_iov = v, .msg_control = control, .msg_controllen = ONE_OF(sizeof control, 5, 0)};
        struct cmsghdr *c = (void *)control;
        *c = (struct cmsghdr){CMSG_LEN(4), ONE_OF(SOL_SOCKET, IPPROTO_IP, 999), ONE_OF(SCM_RIGHTS, 2, SO_MARK, 77)};
        fill(k, area, n);
        m.msg_iovlen = pieces(v, area, n);
        BY(sendmsg, SYS_sendmsg, a->fd, &m, MSG_NOSIGNAL), sent(k, r);
        return told(k, "control %d %d %zu %ld", c->cmsg_level, c->cmsg_type, m.msg_controllen, n);
    }
    case 9: {
        int on = any(2);
        DO(ioctl(a->fd, FIOASYNC, &on));
        return told(k, "FIOASYNC %d", on);
    }
    default: {
        int on = any(2);
        DO(setsockopt(a->fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on));
        return told(k, "inline %d", on);
    }
    }
}

/* ---- files and pipes ---- */

static void files(int k) {
    struct end *a = &ends[k];
    if (info(a->fd).tcpi_state == TCP_CLOSE) return; /* as in `bad` */
    long n = ONE_OF(0, 1, 100, 1000, 3000);
    off_t at = ONE_OF(0, 10, 4000, 100000, -1), *p = any(2) ? &at : any(8) ? NULL : (void *)8;
    if (ends[!k].unread + n > PAGE) n = any(2);
    switch (any(8)) {
    case 0: BY(tee, SYS_tee, a->fd, pipes[1], n, 0); return told(k, "tee");
    case 1: {
        struct iovec v = {area, 10};
        BY(vmsplice, SYS_vmsplice, a->fd, &v, 1, 0);
        return told(k, "vmsplice");
    }
    case 2:
        if (any(2)) DO(copy_file_range(file, NULL, a->fd, NULL, n, 0));
        else DO(copy_file_range(a->fd, NULL, file, NULL, n, 0));
        return told(k, "copy_file_range %ld", n);
    case 3:
        if (any(2)) DO(pread(a->fd, area, n, 0));
        else DO(pwrite(a->fd, area, n, 0));
        return told(k, "pread, pwrite");
    case 4: BY(sendfile, SYS_sendfile, a->fd, any(2) ? pipes[0] : -1, NULL, n); return told(k, "sendfile bad in");
    default: {
        lseek(file, any(5000), SEEK_SET);
        foreign = 1;
        BY(sendfile, SYS_sendfile, a->fd, file, p, n);
        if (p != (void *)8) sent(k, r);
        else if (ends[!k].closed) ends[k].reset_due = 1;
        return told(k, "sendfile %ld %ld at %ld", n, p == &at ? (long)at : p ? -8l : -9l, (long)lseek(file, 0, SEEK_CUR));
    }
    }
}

/* ---- questions and switches ---- */

static void ask(int k) {
    struct end *a = &ends[k];
    int n = -7;
    switch (any(12)) {
    case 0: case 1:
        BY(ioctl, SYS_ioctl, a->fd, FIONREAD, &n);
        return told(k, "FIONREAD %d", tame ? n > 0 : n);
    case 2: BY(ioctl, SYS_ioctl, a->fd, SIOCATMARK, &n); return told(k, "SIOCATMARK %d", n);
    case 3: DO(sockatmark(a->fd)); return told(k, "sockatmark");
    case 4: DO(ioctl(a->fd, any(2) ? SIOCOUTQ : SIOCOUTQNSD, &n)); return told(k, "SIOCOUTQ");
    case 5: BY(ioctl, SYS_ioctl, a->fd, ONE_OF(FIONREAD, SIOCATMARK, FIONBIO, SIOCOUTQ), (void *)ONE_OF(0, 8, (long)area + AREA));
        return told(k, "ioctl bad");
    case 6: DO(fcntl(a->fd, F_GETFL)); return told(k, "F_GETFL");
    case 7: case 8: {
        int on = any(3) == 0;
        if (any(2)) BY(ioctl, SYS_ioctl, a->fd, FIONBIO, &on);
        else BY(fcntl, SYS_fcntl, a->fd, F_SETFL, on ? O_NONBLOCK : 0);
        a->nonblock = on;
        return told(k, "nonblock %d", on);
    }
    case 9: {
        socklen_t len = 4;
        DO(getsockopt(a->fd, SOL_SOCKET, SO_ERROR, &n, &len));
        return told(k, "SO_ERROR %d", n);
    }
    case 10: {
        struct tcp_info i = {0};
        socklen_t len = sizeof i;
        DO(getsockopt(a->fd, IPPROTO_TCP, TCP_INFO, &i, &len));
        return told(k, "state %d", i.tcpi_state == TCP_FIN_WAIT1 ? TCP_FIN_WAIT2 : i.tcpi_state);
    }
    default: {
        struct sockaddr_in s;
        socklen_t len = sizeof s;
        DO(getpeername(a->fd, (void *)&s, &len));
        return told(k, "getpeername %u", len);
    }
    }
}

static void option(int k) {
    struct end *a = &ends[k];
    int name = any(2) ? TCP_NODELAY : TCP_CORK, on = name == TCP_CORK, off = !on;
    switch (any(4)) {
    case 0: /* (not for longer: the kernel holds bytes back) */
        DO(setsockopt(a->fd, IPPROTO_TCP, name, &on, sizeof on));
        send_some(k);
        DO(setsockopt(a->fd, IPPROTO_TCP, name, &off, sizeof off));
        return told(k, "held back %d", name);
    case 1: {
        struct timeval t = {ONE_OF(0, 0, 0, -1), ONE_OF(2000, 4000, 0, 1000000)};
        if (!t.tv_sec && !t.tv_usec) t.tv_usec = 1;
        int name = any(2) ? SO_RCVTIMEO : SO_SNDTIMEO;
        if (name == SO_SNDTIMEO && t.tv_sec == 0) t.tv_sec = 5;
        DO(setsockopt(a->fd, SOL_SOCKET, name, &t, sizeof t));
        if (r == 0 && name == SO_SNDTIMEO) a->hasty = t.tv_sec < 0;
        return told(k, "timeo %d %ld %ld", name, (long)t.tv_sec, (long)t.tv_usec);
    }
    case 2: {
        struct linger l = {any(2), ONE_OF(0, 0, 1)};
        DO(setsockopt(a->fd, SOL_SOCKET, SO_LINGER, &l, sizeof l));
        return told(k, "linger %d %d", l.l_onoff, l.l_linger);
    }
    default: {
        struct timeval t;
        socklen_t len = sizeof t;
        DO(getsockopt(a->fd, SOL_SOCKET, SO_RCVTIMEO, &t, &len));
        return told(k, "get timeo %ld %ld %u", (long)t.tv_sec, (long)t.tv_usec, len);
    }
    }
}

/* ---- what is refused ---- */

static void bad(int k) {
    struct end *a = &ends[k];
    struct iovec v[3] = {{area, 10}, {area + 10, 10}, {area + 20, 10}};
    struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
    struct mmsghdr mm[2] = {{.msg_hdr = m}, {.msg_hdr = m}};
    int bad = any(5);
    void *p = (void *[]){NULL, (void *)8, area + AREA, (void *)-1, (void *)LONG_MIN}[bad];
    int which = any(26);
    if (info(a->fd).tcpi_state == TCP_CLOSE) return; /* an error that waits may be told before */
    long n = ONE_OF(1, 10, 5000);
    fill(k, area, AREA);
    switch (which) {
    case 0: BY(write, SYS_write, a->fd, p, n); break;
    case 1: DO(send(a->fd, p, n, MSG_NOSIGNAL)); break;
    case 2: BY(read, SYS_read, a->fd, p, n); break;
    case 3: DO(recv(a->fd, p, n, ONE_OF(0, MSG_PEEK, MSG_DONTWAIT))); break;
    case 4: BY(writev, SYS_writev, a->fd, p, 2); break;
    case 5: BY(readv, SYS_readv, a->fd, p, 2); break;
    case 6: v[0].iov_base = p, BY(readv, SYS_readv, a->fd, v, 2); break;
    case 7: v[0].iov_base = p, BY(writev, SYS_writev, a->fd, v, 2); break;
    case 8: v[any(2)].iov_len = ONE_OF(-1, LONG_MIN), BY(writev, SYS_writev, a->fd, v, 2); break;
    case 9: v[any(2)].iov_len = ONE_OF(-1, LONG_MIN), BY(readv, SYS_readv, a->fd, v, 2); break;
    case 10: BY(writev, SYS_writev, a->fd, v, ONE_OF(-1, 1025, INT_MAX)); break;
    case 11: BY(readv, SYS_readv, a->fd, v, ONE_OF(-1, 1025, INT_MAX)); break;
    case 12: BY(sendmsg, SYS_sendmsg, a->fd, p, MSG_NOSIGNAL); break;
    case 13: BY(recvmsg, SYS_recvmsg, a->fd, p, 0); break;
    case 14: m.msg_iovlen = ONE_OF(1025, INT_MAX, -1), BY(sendmsg, SYS_sendmsg, a->fd, &m, MSG_NOSIGNAL); break;
    case 15: m.msg_iovlen = ONE_OF(1025, INT_MAX, -1), BY(recvmsg, SYS_recvmsg, a->fd, &m, 0); break;
    case 16: m.msg_iov = p, BY(sendmsg, SYS_sendmsg, a->fd, &m, MSG_NOSIGNAL); break;
    case 17: m.msg_iov = p, BY(recvmsg, SYS_recvmsg, a->fd, &m, 0); break;
    case 18: m.msg_name = p, m.msg_namelen = ONE_OF(-1, 0, 16, 128, 200);
        BY(sendmsg, SYS_sendmsg, a->fd, &m, MSG_NOSIGNAL), sent(k, r); break;
    case 19: m.msg_name = p, m.msg_namelen = ONE_OF(-1, 0, 16, 200);
        BY(recvmsg, SYS_recvmsg, a->fd, &m, 0), note(" %u", m.msg_namelen), taken(k, r > 0 ? r : 0); break;
    case 20: m.msg_control = p, m.msg_controllen = ONE_OF(0, 4, 24, 1 << 20, -1);
        BY(sendmsg, SYS_sendmsg, a->fd, &m, MSG_NOSIGNAL), sent(k, r); break;
    case 21: DO(sendto(a->fd, area, 10, MSG_NOSIGNAL, p, ONE_OF(-1, 0, 16, 200))), sent(k, r); break;
    case 22: { /* what was there is gone, although the call fails */
        socklen_t len = -1;
        void *where = any(2) ? p : &len;
        BY(recvfrom, SYS_recvfrom, a->fd, area, 10, MSG_DONTWAIT, (void *)v, where);
        if (r >= 0) taken(k, r);
        else if (e == EFAULT || e == EINVAL) taken(k, 10);
        break;
    }
    case 23: /* more than there is memory, of which so much is not asked for */
        if (ends[k].unread <= 0 || ends[k].unread > 3000) return;
        BY(read, SYS_read, a->fd, area + AREA - 4000, ONE_OF(5000, 100000));
        if (r > 0) note(" %08x", hash(area + AREA - 4000, r)), taken(k, r);
        break;
    case 24: mm[1].msg_hdr.msg_iov = p, foreign = 1;
        if (any(2)) BY(sendmmsg, SYS_sendmmsg, a->fd, any(2) ? mm : p, 2, MSG_NOSIGNAL), sent(k, r > 0 ? r * 20 : 0);
        else BY(recvmmsg, SYS_recvmmsg, a->fd, p, 2, MSG_DONTWAIT, NULL);
        break;
    default:
        if (any(2)) DO(shutdown(a->fd, ONE_OF(-1, 3, 99)));
        else DO(recv(a->fd, area, ONE_OF(-1, LONG_MAX), MSG_DONTWAIT)), behind(k, AREA, 0), taken(k, r);
    }
    told(k, "bad%d %d %ld", which, bad, n);
}

/* ---- ends ---- */

static void shut(int k) {
    int how = ONE_OF(SHUT_WR, SHUT_WR, SHUT_RD, SHUT_RDWR);
    if (tame && how != SHUT_WR) return; /* limit 17 */
    BY(shutdown, SYS_shutdown, ends[k].fd, how);
    if (how != SHUT_RD) ends[k].shut = 1;
    if (how != SHUT_WR) ends[k].rdshut = 1;
    told(k, "shutdown %d", how);
}

static void close_end(int k) {
    struct linger l;
    socklen_t len = sizeof l;
    getsockopt(ends[k].fd, SOL_SOCKET, SO_LINGER, &l, &len);
    if (l.l_onoff && !l.l_linger) ends[!k].reset_due = 1; /* a reset comes */
    if (ends[k].unread) ends[!k].reset_due = 1;
    int fd = ends[k].fd;
    BY(close, SYS_close, fd);
    ends[k].closed = 1;
    told(k, "close");
}

/* What each end is said to be ready for. */
static int ready_for(int k, int how) {
    struct end *a = &ends[k];
    short all = POLLIN | POLLPRI | POLLOUT | POLLRDHUP | POLLRDNORM | POLLRDBAND | POLLWRNORM | POLLWRBAND;
    int mask = ends[!k].unread > PAGE && !ends[!k].closed ? ~(POLLOUT | POLLWRNORM) : ~0, events = 0;
    struct timespec none = {0, 0};
    if (how < 2) {
        struct pollfd p = {a->fd, all, 0};
        if (how) BY(poll, SYS_poll, &p, 1, 0);
        else DO(ppoll(&p, 1, &none, NULL));
        events = p.revents & mask;
    } else if (how == 2) {
        fd_set in, outs, ex;
        FD_ZERO(&in);
        FD_SET(a->fd, &in);
        outs = ex = in;
        DO(pselect(a->fd + 1, &in, &outs, &ex, &none, NULL));
        events = (FD_ISSET(a->fd, &in) ? 1 : 0) | (mask == ~0 && FD_ISSET(a->fd, &outs) ? 2 : 0) | (FD_ISSET(a->fd, &ex) ? 4 : 0);
    } else {
        int which = how == 3 ? set : epoll_create1(0);
        struct epoll_event ev = {(all & 0xffff) | ONE_OF(0, EPOLLET, EPOLLONESHOT), {.u64 = k}}, got[3];
        if (how == 4) need(!epoll_ctl(which, EPOLL_CTL_ADD, a->fd, &ev), "ADD");
        if (how == 3) pause_us(25); /* since it was asked for the other end: as in `settle` */
        DO(epoll_wait(which, got, 3, 0));
        for (int j = 0; j < r; j++)
            if (got[j].data.u64 == (uint64_t)k) events = got[j].events & mask;
        if (how == 4) close(which);
    }
    return events;
}

/* Where a switch may come at any time: what one answer or the next says, for it may lie inside one. */
static void look(int k) {
    int how = any(5), events = ready_for(k, how);
    for (int turn = 0; (tame || !warm) && turn < 2; turn++) events |= ready_for(k, how);
    say("  %c%d %x\n", 'a' + k, how, events);
}

/* ---- a seed ---- */

static void begin(uint64_t seed) {
    struct timeval t = {0, 2000}, longer = {10, 0};
    state = seed * 7919;
    say("seed %lu\n", seed);
    foreign = wide = 0;
    set = epoll_create1(0);
    struct epoll_event none;
    need(epoll_wait(set, &none, 1, 0) == 0, "the first wait"); /* before which nothing in it gets a lane */
    join_ends();
    for (int k = 0; k < 2; k++) {
        int fd = ends[k].fd;
        struct epoll_event ev = {EPOLLIN | EPOLLPRI | EPOLLOUT | EPOLLRDHUP, {.u64 = k}};
        if (seed % 3) need(!epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev), "ADD");
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &longer, sizeof t);
    }
    warm = seed % 4 != 0; /* else the lane comes when it comes */
    if (warm) warm_up();
    for (int k = 0; k < 2; k++) setsockopt(ends[k].fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
}

static void one(int k) {
    static void (*const often[])(int) = {send_some, send_some, send_some, receive_some, receive_some, receive_some,
                                         send_many, receive_many, ask, option, bad, files};
    by_number = any(3) == 0;
    int rare = any(120);
    if (rare < 4 && step > 5) moved(k);
    else if (rare < 6) shut(k);
    else if (rare < 8 && step > 10) close_end(k);
    else often[any(sizeof often / sizeof *often)](k);
}

static void run(uint64_t seed) {
    begin(seed);
    for (step = 0; step < STEPS; step++) {
        int k = any(2);
        if (ends[k].closed) k = !k;
        if (ends[k].closed) break;
        one(k);
        settle();
        if (r < 0 && any(2) == 0 && !ends[k].closed) look(k);
        for (k = 0; k < 2; k++)
            if (!ends[k].closed) look(k);
    }
    for (int k = 0; k < 2; k++)
        if (!ends[k].closed) close(ends[k].fd);
    close(set);
    fflush(out);
}

static void on_sigpipe(int n) {
    sigpipes += n == SIGPIPE;
}

int main(int argc, char **argv) {
    need(argc >= 4, "arguments");
    struct sigaction sa = {.sa_handler = on_sigpipe, .sa_flags = SA_RESTART};
    sigaction(SIGPIPE, &sa, NULL);
    tame = argc > 4;
    out = fopen(argv[3], "w");
    need(!!out, "file");
    set_up();
    file = open("/tmp", O_TMPFILE | O_RDWR, 0600);
    for (int k = 0; k < 5000; k++) text[k] = k % 251;
    need(write(file, text, 5000) == 5000 && !pipe(pipes), "file");
    uint64_t first = strtoull(argv[1], NULL, 10), count = strtoull(argv[2], NULL, 10);
    for (uint64_t s = first; s < first + count; s++) run(s);
    fclose(out);
    printf("result ok lanes %d unsettled %d\n", lanes, unsettled);
    return 0;
}

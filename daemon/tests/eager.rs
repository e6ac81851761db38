//! Registrations that are expedited: the other end's shim is found and asked to register.

mod common;
use common::*;
use lane::abi::TcpPos;
use lane::family::flag;
use lane::proto::msg::{op, register, ToDaemon, ToShim};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering::Relaxed;
use underpass_admin::{Request, Target};

fn eagerly(a: &mut Shim, conn: u32, s: &TcpStream) {
    let gen = a.gen(conn);
    a.say(
        ToDaemon::Register {
            conn,
            gen,
            tx_tcp_pos: TcpPos::default(),
            rx_tcp_pos: TcpPos::default(),
            flags: register::EAGER,
        },
        &[s],
    );
}

fn command(s: &mut Shim) -> (u32, u32, u32) {
    s.until("a command", |m| match *m {
        ToShim::Command { conn, gen, op } => Some((conn, gen, op)),
        _ => None,
    })
}

#[test]
fn an_idle_other_end_is_asked_to_register() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let (c2, s2) = tcp();
    b.enter(&s2, false); // another one, of which nobody wants anything
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.enter(&c2, true);
    eagerly(&mut a, i, &c);
    assert_eq!(command(&mut b), (j, b.gen(j), op::EAGER));
    b.register(j, &s);
    let (x, y) = offers(&mut a, &mut b);
    assert_eq!((x.conn, y.conn), (i, j));
}

/// Its shim has not looked at the socket: there is no address to find it by.
#[test]
fn an_other_end_without_a_name_is_found_by_its_descriptor() {
    let d = Daemon::plain();
    let mut a = Shim::new(&d.dir);
    let (c, s) = tcp();
    let i = a.enter(&c, true);
    let j = a.enter(&s, false);
    a.conn(j).flags.store(0, Relaxed);
    eagerly(&mut a, i, &c);
    let inode = rustix::fs::fstat(&s).unwrap().st_ino;
    assert_eq!(
        command(&mut a),
        (s.as_raw_fd() as u32, inode as u32, op::EAGER_FD)
    );
    assert_eq!(a.conn(j).flags.load(Relaxed) & flag::NAMED, 0);
}

/// Usual registrations wait in peace.
#[test]
fn nobody_is_asked_for_one_that_is_in_no_expedited() {
    let d = Daemon::plain();
    let (mut a, mut b) = (Shim::new(&d.dir), Shim::new(&d.dir));
    let (c, s) = tcp();
    let (i, j) = (a.enter(&c, true), b.enter(&s, false));
    a.register(i, &c);
    a.credit();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let inode = rustix::fs::fstat(&s).unwrap().st_ino;
    d.ask(&Request::Down {
        target: Target::Inode(inode),
    });
    assert_eq!(command(&mut b), (j, b.gen(j), op::DOWN), "the first one");
}

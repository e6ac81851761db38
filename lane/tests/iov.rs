//! A receive that TCP serves in pieces leaves the buffers where the bytes ended, so that whoever
//! goes on (MSG_WAITALL, a switch inside one read) leaves no hole.

use lane::half::Iov;

#[test]
fn untake_goes_back_inside_the_last_run() {
    let mut a = [0u8; 10];
    let mut b = [0u8; 5];
    let v = [
        libc::iovec {
            iov_base: a.as_mut_ptr().cast(),
            iov_len: 10,
        },
        libc::iovec {
            iov_base: b.as_mut_ptr().cast(),
            iov_len: 5,
        },
    ];
    let mut i = Iov::new(&v);
    let (p, n) = i.take(100).unwrap();
    assert_eq!(n, 10);
    i.untake(7);
    assert_eq!(i.left(), 12);
    let (q, m) = i.take(4).unwrap();
    assert_eq!((q as usize - p as usize, m), (3, 4));
    assert_eq!(i.take(100).unwrap().1, 3);
    assert_eq!(i.take(100).unwrap().1, 5);
    assert!(i.take(1).is_none());
}

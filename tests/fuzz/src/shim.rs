//! What a shim and its daemon say to each other, and two shims.

use crate::input::Input;
use lane::abi::{
    loc_index, tx, Cursor, LocWord, LogEntry, RxWord, SpaceWord, TakeoverWord, TxWord, Word,
    CHUNKS, LANES_PER_COUNTER,
};
use lane::proto::frame::{self, Frame};
use lane::proto::msg::{ToDaemon, ToShim, MAX};

/// What is accepted has one form, but for bytes behind its last field, and none of its fields is taken from behind its
/// end.
macro_rules! one_form {
    ($message:ty, $data:expr) => {
        if let Ok(m) = <$message>::decode($data) {
            let mut b = [0; MAX];
            let n = m.encode(&mut b);
            assert_eq!(<$message>::decode(&b[..n]), Ok(m));
            assert_eq!((&$data[..2], &$data[4..n]), (&b[..2], &b[4..n]), "{m:?}");
            let said = usize::from(u16::from_le_bytes([$data[2], $data[3]]));
            assert!(n - 4 <= said && said <= $data.len() - 4, "{m:?}: {said}");
            for cut in 0..n {
                assert!(<$message>::decode(&b[..cut]).is_err(), "{m:?} cut to {cut}");
            }
        }
    };
}

/// A datagram, as either side gets it.
pub(crate) fn control(data: &[u8]) {
    one_form!(ToDaemon, data);
    one_form!(ToShim, data);
}

/// The first bytes that TCP has below a lane.
pub(crate) fn frame(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<{ frame::LEN }>() else {
        let _ = Frame::could_start(data);
        return;
    };
    if let Some(f) = Frame::decode(bytes) {
        assert_eq!(f.encode(), *bytes);
        for n in 0..=bytes.len() {
            assert!(Frame::could_start(&bytes[..n]));
        }
    }
}

/// Words of shared memory, one by one.
pub(crate) fn words(data: &[u8]) {
    let mut input = Input(data);
    let raw = input.u64();
    let (t, r) = (TxWord::from_raw(raw), RxWord::from_raw(raw));
    let o = TakeoverWord::from_raw(raw);
    let clean = raw & 0xff_ffff_ffff;
    assert_eq!(TxWord::new(t.epoch(), t.phase()).raw(), clean);
    assert_eq!(RxWord::new(r.epoch(), r.flags()).raw(), clean);
    assert_eq!(TakeoverWord::new(o.epoch(), o.phase()).raw(), clean);
    let name = tx::Phase::of(t.phase());
    assert!(name.is_none_or(|n| n.value() == t.phase()));
    assert!(LogEntry::from_raw(raw).lane() < LANES_PER_COUNTER);
    let (space, room) = (SpaceWord::from_raw(input.u32()), input.u32());
    assert!(space.unread_max(|| room) >= u64::from(room.min(1)));
    assert!(loc_index(input.u32()) < 2);
    let Some(l) = LocWord::from_raw(input.u64()).loc() else {
        return;
    };
    assert_eq!(l.word().loc(), Some(l));
    assert!(l.chunk >= 1 && (l.chunk as usize) < CHUNKS);
    let (at, n) = (Cursor::new(input.u64()), input.u32() as usize);
    let (chunk, from) = (input.u32() as usize, l.page as usize * 4096);
    let Some([a, b]) = l.pieces(at, n) else {
        assert!(n > l.bytes());
        return;
    };
    assert_eq!(a.len() + b.len(), n);
    for part in [a, b] {
        assert!(part.start >= from && part.end <= from + l.bytes());
        assert!(!l.fits(chunk) || part.end <= chunk);
    }
}

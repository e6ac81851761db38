//! Clients whose memory is limited.

use super::*;

/// Whose memory is limited gets little at a time; the other one is not concerned.
#[test]
fn a_limited_side() {
    for (log2, data) in [
        (12, 256 << 10),
        (16, 256 << 10),
        (20, 4 << 20),
        (22, 16 << 20),
    ] {
        assert_eq!(Size::Small(log2).first_bytes(), CONTROL_BYTES + data);
    }
    const FIRST: u64 = (CONTROL_BYTES + (256 << 10)) as u64;
    const CHUNK: u64 = 4 << 20;
    let mut w = World::new(2000, u64::MAX);
    w.sizes = [Size::Whole, Size::Small(16)];
    let (one, two) = (ClientId(1), ClientId(2));
    assert_eq!(w.groups.lacks(two, one, w.sizes[1]), Some(FIRST));
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let held = |w: &World| [0, 1].map(|n: usize| w.cgroups[n].memory_taken());
    assert_eq!(held(&w), [AREA, FIRST]);
    let group = w.offers[0].1;
    // Nobody but the daemon has touched anything.
    let payer = w.cgroups[1].clone();
    let untouched = |w: &World, id| w.groups.untouched(&payer, |c| c == id);
    let first = untouched(&w, two);
    assert!((FIRST - 8192..FIRST).contains(&first), "{first}");
    assert_eq!(untouched(&w, one), 0, "somebody else pays for that");
    let file = w.groups.groups[&group].sides[1].first.fd.clone();
    assert!(memfd::touched(&file) > 0);
    // It is refused more: each lane may need it, until there is some.
    assert_eq!(w.groups.lacks(two, one, w.sizes[1]), None);
    assert_eq!(w.groups.would_grow(two, group, 1), Some(CHUNK));
    assert_eq!(w.groups.would_grow(one, group, 1), None, "not its side");
    w.groups.starve(group, 1);
    assert_eq!(w.groups.lacks(two, one, w.sizes[1]), Some(CHUNK));
    assert_eq!(w.groups.lacks(one, two, w.sizes[0]), None);
    let mut out = Out::default();
    w.groups.want_chunk(two, group, 1, &mut out).unwrap();
    assert!(matches!(
        out.sends[0].msg,
        ToShim::Chunk { bytes: CHUNK, .. }
    ));
    assert_eq!(w.groups.lacks(two, one, w.sizes[1]), None);
    assert_eq!(w.groups.would_grow(two, group, 1), None, "it grows");
    w.help(out);
    assert_eq!(w.groups.would_grow(two, group, 1), Some(CHUNK));
    assert_eq!(held(&w), [AREA, FIRST + CHUNK]);
    assert_eq!(untouched(&w, two), first + CHUNK);
    let mut out = Out::default();
    w.groups.client_dead(one, &[], &mut out);
    assert_eq!(held(&w), [0, 0]);
    assert_eq!(payer.memory_granted(), FIRST + CHUNK, "that only grows");
}

/// When each link group of two processes is full, another lane takes an area.
#[test]
fn a_full_link_group_lacks_another() {
    let mut w = World::new(5000, u64::MAX);
    w.sizes = [Size::Small(16); 2];
    for i in 0..LANES as u32 {
        w.connect([end(1, i), end(2, i)]).unwrap();
    }
    let (one, two) = (ClientId(1), ClientId(2));
    let first = w.sizes[0].first_bytes() as u64;
    assert_eq!(w.groups.lacks(one, two, w.sizes[0]), Some(first));
    w.done(w.offers[0].1, 5);
    assert_eq!(w.groups.lacks(one, two, w.sizes[0]), None);
}

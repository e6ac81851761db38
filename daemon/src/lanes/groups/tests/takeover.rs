//! Directions that are taken over.

use super::*;

/// A slot is not used anew as long as a helper is at work on what one of its ends had sent.
#[test]
fn a_slot_that_is_taken_over() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let (group, mut out) = (w.offers[0].1, Out::default());
    let ask = |w: &mut World, from, side| {
        w.groups
            .take_over(ClientId(from), (group, 0), (side, 1 - side))
    };
    assert!(
        ask(&mut w, 2, 1).unwrap().is_none(),
        "nothing proves its socket"
    );
    w.groups.proven((group, 0), end(1, 0), (77, None));
    let found = ask(&mut w, 2, 1).unwrap().expect("end 1's");
    assert_eq!(
        (found.cookie, w.groups.owner(group, 1)),
        (77, Some(ClientId(2)))
    );
    let d = found.direction;
    assert_eq!((d.who, d.side, d.uses), (end(1, 0), 0, 0));
    assert_eq!((found.files.len(), found.words.len()), (1, CONTROL_BYTES));
    assert!(ask(&mut w, 2, 1).unwrap().is_none(), "it is under way");
    assert!(ask(&mut w, 2, 0).is_err() && ask(&mut w, 3, 1).is_err());
    assert!(w.groups.take_over(ClientId(2), (group, 1), (1, 0)).is_err());
    w.done(group, 0);
    w.connect([end(1, 1), end(2, 1)]).unwrap();
    assert_eq!((w.groups.lanes(), w.offers.last().unwrap().2), (2, 1));
    w.groups.taken_over(Direction { uses: 7, ..d }, &mut out);
    assert_eq!(w.groups.lanes(), 2, "another use");
    w.groups.taken_over(d, &mut out);
    assert_eq!(w.groups.lanes(), 1);
    w.connect([end(1, 2), end(2, 2)]).unwrap();
    assert_eq!(w.offers.last().map(|o| (o.2, o.3)), Some((0, EPOCHS)));
}

/// An end may ask for what it sends itself. Who asks for the other end's direction again and again does not keep that end
/// from it.
#[test]
fn an_end_hands_its_own_direction_over() {
    let mut w = World::new(10, u64::MAX);
    w.connect([end(1, 0), end(2, 0)]).unwrap();
    let (group, mut out) = (w.offers[0].1, Out::default());
    w.groups.proven((group, 0), end(1, 0), (77, None));
    let mut ask = |from, sides| w.groups.take_over(ClientId(from), (group, 0), sides);
    assert!(ask(1, (0, 2)).is_err());
    let theirs = ask(2, (1, 0)).unwrap().expect("end 1's");
    assert!(!theirs.own && ask(1, (0, 0)).unwrap().is_none());
    w.groups.taken_over(theirs.direction, &mut out);
    let mut ask = |from, sides| w.groups.take_over(ClientId(from), (group, 0), sides);
    assert!(ask(2, (1, 0)).unwrap().is_none(), "too soon");
    let ours = ask(1, (0, 0)).unwrap().expect("the same");
    let d = ours.direction;
    assert_eq!((ours.own, d.who, d.side), (true, end(1, 0), 0));
}

use super::*;

pub const RAILS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Life {
    Up,
    /// D1 knows; D2's end still takes what comes.
    Dead,
    /// D2 has destroyed its end, and D1 has heard of it: nothing can land any more.
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rail {
    pub life: Life,
    pub flight: Option<Snap>,
    /// Taken by D2's adapter, which has said so to D1's; D2 has not looked yet.
    pub arrived: Option<Snap>,
}

/// The control channel over TLS: slow, and it carries no data.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tls {
    pub up: bool,
    pub forth: Option<Snap>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Net {
    pub rails: [Rail; RAILS],
    pub tls: Tls,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Land(usize),
    Destroy(usize),
    Fail(usize),
    Repair(usize),
    Cut,
}

impl Net {
    pub fn new() -> Self {
        let rail = || Rail {
            life: Life::Up,
            flight: None,
            arrived: None,
        };
        Net {
            rails: [rail(), rail()],
            tls: Tls {
                up: true,
                forth: None,
            },
        }
    }

    pub fn rail_up(&self) -> bool {
        self.rails.iter().any(|r| r.life == Life::Up)
    }
}

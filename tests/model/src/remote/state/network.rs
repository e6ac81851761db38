//! What is on its way between the nodes.

use super::messages::{Back, Forth};
use super::*;

pub const RAILS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RailState {
    Up,
    /// D1's end is destroyed; D2's still takes what comes.
    Dead,
    /// D2 has destroyed its end, and D1 has heard of it: nothing can land any more.
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rail {
    pub state: RailState,
    pub flight: Option<Forth>,
    /// Taken by D2's adapter, which has said so to D1's; D2 has not looked yet.
    pub arrived: Option<Forth>,
    /// The other way round, if messages take their time there.
    pub back: Option<Back>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Net {
    pub rails: [Rail; RAILS],
    /// The control channel over TLS, which carries neither data nor words, but questions about a switch; and what is
    /// under way on it.
    pub tls: bool,
    pub under_way: Option<messages::Tls>,
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
            state: RailState::Up,
            flight: None,
            arrived: None,
            back: None,
        };
        Net {
            rails: [rail(), rail()],
            tls: true,
            under_way: None,
        }
    }

    pub fn is_up(&self, rail: usize) -> bool {
        self.rails[rail].state == RailState::Up
    }

    /// Is there a link?
    pub fn rail_up(&self) -> bool {
        (0..RAILS).any(|i| self.is_up(i))
    }

    pub fn cut(&mut self) {
        (self.tls, self.under_way) = (false, None);
    }
}

//! Operator commands (`down`, `up`) for programs that have no control connection at present: they are sent when
//! the program says hello.

use lane::proto::msg::{op, ToShim, ALL};

/// The last command on each connection of a process that cannot be told now. At most one for each entry of its
/// table, because nothing is asked of other numbers.
#[derive(Debug, Default)]
pub struct PendingCommands(Vec<(u32, u32, u32)>);

impl PendingCommands {
    /// Keeps it if it is an operator's command; other commands would be useless later.
    pub fn add(&mut self, conn: u32, gen: u32, what: u32) {
        if what != op::DOWN && what != op::UP {
            return;
        }
        self.0.retain(|o| conn != ALL && o.0 != conn);
        self.0.push((conn, gen, what));
    }

    pub fn messages(self) -> impl Iterator<Item = ToShim> {
        let message = |(conn, gen, op)| ToShim::Command { conn, gen, op };
        self.0.into_iter().map(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_on_a_connection_is_kept() {
        let mut o = PendingCommands::default();
        o.add(1, 1, op::DOWN);
        o.add(2, 1, op::DOWN);
        o.add(1, 2, op::UP);
        o.add(3, 1, op::EAGER);
        assert_eq!(o.0, [(2, 1, op::DOWN), (1, 2, op::UP)]);
        o.add(ALL, 0, op::DOWN);
        o.add(2, 1, op::UP);
        let said: Vec<_> = o.messages().collect();
        let command = |conn, gen, op| ToShim::Command { conn, gen, op };
        assert_eq!(said, [command(ALL, 0, op::DOWN), command(2, 1, op::UP)]);
    }
}

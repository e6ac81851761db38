//! What is shown and chosen: everything of `top` but the daemon and the terminal.

use super::lines::{self, Kind, Line, View, VIEWS};
use super::sample::{Id, Meter, Seen};
use std::cmp::Ordering;
use std::ops::Range;

/// Characters of a filter: more than any text to look for has.
const FILTER_MAX: usize = 60;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Key {
    Char(char),
    Tab,
    BackTab,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Esc,
    Backspace,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sort {
    pub column: usize,
    /// Not in the order that the column has by itself.
    pub reversed: bool,
}

#[derive(Debug)]
pub struct State {
    pub view: View,
    /// One for each view.
    sorts: [Sort; 3],
    pub filter: String,
    /// Do keys go into the filter?
    pub typing: bool,
    pub paused: bool,
    pub help: bool,
    /// Why the last look failed.
    pub trouble: Option<String>,
    pub seen: Seen,
    meter: Meter,
    /// What the view shows, in order.
    lines: Vec<Line>,
    /// Position of the selected line among them; 0 if there is none.
    selected: usize,
    /// The selected line, which is followed wherever it is sorted to. `None`: the first line, whichever that is.
    followed: Option<Id>,
    /// The first line on the screen, and how many there is room for.
    first: usize,
    page: usize,
}

impl State {
    pub fn new(seen: Seen, view: View) -> Self {
        let sort = |v| Sort {
            column: lines::first_sort(v),
            reversed: false,
        };
        let mut meter = Meter::default();
        meter.take(&seen);
        let mut s = State {
            view,
            sorts: VIEWS.map(sort),
            filter: String::new(),
            typing: false,
            paused: false,
            help: false,
            trouble: None,
            seen,
            meter,
            lines: Vec::new(),
            selected: 0,
            followed: None,
            first: 0,
            page: 1,
        };
        s.arrange();
        s
    }

    /// A look at the daemon: what it said, or why it did not. Then what was there before stays.
    pub fn take(&mut self, look: Result<Seen, String>) {
        match look {
            Ok(seen) => {
                self.trouble = None;
                self.meter.take(&seen);
                self.seen = seen;
                self.arrange();
            }
            Err(trouble) => self.trouble = Some(trouble),
        }
    }

    /// Is this the end?
    pub fn press(&mut self, key: Key) -> bool {
        if self.help {
            self.help = false;
            return false;
        }
        if self.typing {
            self.edit(key);
            return false;
        }
        let n = self.lines.len();
        match key {
            Key::Char('q') => return true,
            Key::Char('?') => self.help = true,
            Key::Char(' ') => self.paused = !self.paused,
            Key::Char('/') => self.typing = true,
            Key::Char('1') => self.show(0),
            Key::Char('2') => self.show(1),
            Key::Char('3') => self.show(2),
            Key::Tab => self.show(self.view.number() + 1),
            Key::BackTab => self.show(self.view.number() + VIEWS.len() - 1),
            Key::Char('s' | '>') => self.sort_by(1),
            Key::Char('<') => self.sort_by(self.view.columns().len() - 1),
            Key::Char('r') => {
                let sort = &mut self.sorts[self.view.number()];
                sort.reversed = !sort.reversed;
                self.arrange();
            }
            Key::Up => self.select(self.selected.saturating_sub(1)),
            Key::Down => self.select(self.selected + 1),
            Key::PageUp => self.select(self.selected.saturating_sub(self.page)),
            Key::PageDown => self.select(self.selected.saturating_add(self.page)),
            Key::Home => self.select(0),
            Key::End => self.select(n),
            Key::Esc if !self.filter.is_empty() => {
                self.filter.clear();
                self.arrange();
            }
            _ => {}
        }
        false
    }

    fn edit(&mut self, key: Key) {
        match key {
            Key::Enter => self.typing = false,
            Key::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Char(c) if !c.is_control() && self.filter.chars().count() < FILTER_MAX => {
                self.filter.push(c);
            }
            _ => {}
        }
        self.arrange();
    }

    fn show(&mut self, number: usize) {
        self.view = VIEWS[number % VIEWS.len()];
        self.followed = None;
        self.arrange();
    }

    fn sort_by(&mut self, further: usize) {
        let n = self.view.columns().len();
        let sort = &mut self.sorts[self.view.number()];
        *sort = Sort {
            column: (sort.column + further) % n,
            reversed: false,
        };
        self.arrange();
    }

    fn select(&mut self, to: usize) {
        self.selected = to.min(self.lines.len().saturating_sub(1));
        let line = self.lines.get(self.selected).filter(|_| to != 0);
        self.followed = line.map(|l| l.id.clone());
    }

    /// Makes the view's lines anew.
    fn arrange(&mut self) {
        let mut all = lines::lines(self.view, &self.seen, &self.meter);
        let columns = self.view.columns();
        let filter = self.filter.to_lowercase();
        all.retain(|l| {
            let mut texts = columns.iter().zip(&l.cells);
            filter.is_empty()
                || texts.any(|(column, cell)| {
                    column.kind != Kind::Number && cell.text.to_lowercase().contains(&filter)
                })
        });
        let sort = self.sort();
        let kind = columns[sort.column].kind;
        all.sort_by(|a, b| {
            let o = order(kind, a, b, sort.column);
            // Equal ones keep their places from one look to the next.
            let o = if sort.reversed { o.reverse() } else { o };
            o.then_with(|| a.id.cmp(&b.id))
        });
        self.lines = all;
        let found = self.followed.as_ref();
        let found = found.and_then(|id| self.lines.iter().position(|l| l.id == *id));
        match (found, &self.followed) {
            (Some(n), _) => self.selected = n,
            (None, None) => self.selected = 0,
            // It is gone: what has moved into its place is next.
            (None, Some(_)) => self.select(self.selected),
        }
    }

    pub fn sort(&self) -> Sort {
        self.sorts[self.view.number()]
    }

    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    pub fn selected(&self) -> usize {
        self.selected
    }

    /// The lines that are on a screen with room for `page`, the selected one among them.
    pub fn window(&mut self, page: usize) -> Range<usize> {
        let n = self.lines.len();
        self.page = page.max(1);
        let last_first = n.saturating_sub(self.page);
        let lowest = (self.selected + 1).saturating_sub(self.page);
        self.first = self
            .first
            .clamp(lowest, self.selected.max(lowest))
            .min(last_first);
        self.first..n.min(self.first + page)
    }

    /// What else is known of the selected line.
    pub fn about(&self) -> Vec<String> {
        let line = self.lines.get(self.selected);
        line.map_or_else(Vec::new, |l| lines::about(l.about, &self.seen))
    }

    /// What is shown instead of lines, where there are none.
    pub fn nothing(&self) -> String {
        match (self.view, &self.seen.pods) {
            _ if !self.filter.is_empty() => "nothing has the text of the filter".into(),
            (View::Connections, _) => "no connections of programs under the shim".into(),
            (View::Pods, Err(why)) => why.clone(),
            (View::Pods, Ok(_)) => "no containers that asked for the shim".into(),
            (View::Rails, _) => {
                "no RDMA port carries connections, or has (see `underpass devices`)".into()
            }
        }
    }

    /// In one line: connections by mode, and all bytes per second.
    pub fn sums(&self) -> String {
        let [smcd, smcr, tcp] = lines::modes(&self.seen.rows);
        let (tx, rx) = self.meter.sum(self.seen.rows.iter());
        format!(
            "ends: {smcd} SMCD, {smcr} SMCR, {tcp} TCP; out {}, in {}",
            lines::rate(tx),
            lines::rate(rx)
        )
    }
}

fn order(kind: Kind, a: &Line, b: &Line, column: usize) -> Ordering {
    let (a, b) = (&a.cells[column], &b.cells[column]);
    match kind {
        Kind::Number => b.value.cmp(&a.value),
        Kind::Text | Kind::Address => a.text.cmp(&b.text),
    }
}

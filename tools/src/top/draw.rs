//! The state on a screen, or as text.

use super::lines::{Column, Kind, Line, View, VIEWS};
use super::state::State;
use crate::addr::smcss;
use crate::ask::duration;
use crate::out::clean;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize};
use ratatui::text::{self, Span};
use ratatui::widgets::{Block, Borders, Cell, Clear, Paragraph, Row, Table};
use ratatui::Frame;

/// A column of text that has to be cut becomes no narrower than this: an address keeps its port.
const NARROWEST: u16 = 16;
/// Lines about the selected line, on a screen that has room for them.
const ABOUT: u16 = 6;
const ROOMY: u16 = 18;

const KEYS: &str = "q quit  Tab 1 2 3 view  s < > sort  r reverse  / filter  space pause  ? help";

const HELP: &str = "\
q, Ctrl-C            quit
Tab, 1, 2, 3         connections, pods, rails
arrows, PageUp/Down, Home, End
                     choose a line; below is what is known of it
s or >, <            sort by the next column, by the one before
r                    the other way round
/                    show lines with a text; Enter keeps it, Esc ends it
space                pause, and go on

Out/s and In/s are bytes per second between the last two looks, on TCP
and on the ring. A connection within the node has two lines: its ends.";

pub fn draw(f: &mut Frame<'_>, s: &mut State) {
    let area = f.area();
    let about = match area.height < ROOMY {
        true => 0,
        false => ABOUT,
    };
    let [title, sums, table, below, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(about),
        Constraint::Length(1),
    ])
    .areas(area);
    f.render_widget(titles(s), title);
    f.render_widget(state_line(s), sums);
    lines(f, s, table);
    if about != 0 {
        let text: Vec<_> = s.about().into_iter().map(text::Line::from).collect();
        f.render_widget(
            Paragraph::new(text).block(Block::new().borders(Borders::TOP)),
            below,
        );
    }
    f.render_widget(
        match s.typing {
            true => text::Line::from(format!("/{}_", s.filter)),
            false => text::Line::from(KEYS).dim(),
        },
        keys,
    );
    if s.help {
        help(f, area);
    }
}

fn titles(s: &State) -> text::Line<'static> {
    let mut spans = Vec::new();
    for (n, v) in VIEWS.into_iter().enumerate() {
        let title = format!(" {} {} ", n + 1, v.title());
        spans.push(match v == s.view {
            true => Span::from(title).reversed(),
            false => Span::from(title),
        });
    }
    spans.push(Span::from(format!("  {}", daemon(s))));
    text::Line::from(spans)
}

fn daemon(s: &State) -> String {
    let stats = &s.seen.stats;
    let up = duration(stats.uptime_s);
    format!("underpassd {}, up {up}", clean(&stats.version))
}

/// The sums; or, in their place, that there is no daemon: then they are old.
fn state_line(s: &State) -> text::Line<'static> {
    if let Some(t) = &s.trouble {
        return text::Line::from(format!("trying again: {t}")).red().bold();
    }
    let mut line = text::Line::from(s.sums());
    if s.paused {
        line.push_span(Span::from("  paused").yellow().bold());
    }
    if !s.filter.is_empty() && !s.typing {
        line.push_span(Span::from(format!("  filter: {}", s.filter)).bold());
    }
    line
}

fn lines(f: &mut Frame<'_>, s: &mut State, area: Rect) {
    let page = usize::from(area.height.saturating_sub(1));
    let window = s.window(page);
    let columns = s.view.columns();
    let sort = s.sort();
    let shown = &s.lines()[window.clone()];
    // Of what is on the screen: a long name far below costs no room.
    let widths = fit(&natural(columns, shown), columns, area.width);
    let head = columns[..widths.len()].iter().enumerate().map(|(n, c)| {
        let line = aligned(head(c, n, s), c.kind);
        match n == sort.column {
            true => Cell::from(line.bold().underlined()),
            false => Cell::from(line.bold()),
        }
    });
    let rows = shown.iter().enumerate().map(|(n, l)| {
        let cells = columns.iter().zip(&l.cells).zip(&widths);
        let row = Row::new(cells.map(|((c, cell), w)| {
            let text = cut(&cell.text, c.kind, *w);
            Cell::from(aligned(text, c.kind))
        }));
        match window.start + n == s.selected() {
            true => row.style(Style::new().reversed()),
            false => row.style(colour(s.view, l)),
        }
    });
    let table = Table::new(rows, widths.iter().map(|w| Constraint::Length(*w)))
        .header(Row::new(head))
        .column_spacing(1);
    f.render_widget(table, area);
    if s.lines().is_empty() && area.height > 1 {
        let below = Rect {
            y: area.y + 1,
            height: 1,
            ..area
        };
        f.render_widget(text::Line::from(s.nothing()).italic(), below);
    }
}

/// Connections below TCP stand out.
fn colour(v: View, l: &Line) -> Style {
    match (v, l.cells.first().map(|c| c.text.as_str())) {
        (View::Connections, Some("SMCD")) => Style::new().green(),
        (View::Connections, Some("SMCR")) => Style::new().cyan(),
        _ => Style::new(),
    }
}

/// A column's name; an arrow says which way the table is sorted by it.
fn head(c: &Column, n: usize, s: &State) -> String {
    let sort = s.sort();
    let down = (c.kind == Kind::Number) != sort.reversed;
    match (n == sort.column, down) {
        (false, _) => c.head.into(),
        (true, true) => format!("{}▼", c.head),
        (true, false) => format!("{}▲", c.head),
    }
}

fn aligned(text: String, kind: Kind) -> text::Line<'static> {
    let line = text::Line::from(text);
    match kind {
        Kind::Number => line.right_aligned(),
        Kind::Text | Kind::Address => line,
    }
}

fn cut(text: &str, kind: Kind, width: u16) -> String {
    match kind {
        Kind::Address => smcss(text, width.max(NARROWEST).into(), false),
        Kind::Text | Kind::Number => text.into(),
    }
}

/// How wide each column wants to be.
fn natural(columns: &[Column], lines: &[Line]) -> Vec<u16> {
    let width = |s: &str| u16::try_from(Span::from(s).width()).unwrap_or(u16::MAX);
    let of = |(n, c): (usize, &Column)| {
        let cells = lines.iter().map(|l| width(&l.cells[n].text));
        // (One more for the arrow.)
        cells.max().unwrap_or(0).max(width(c.head) + 1)
    };
    columns.iter().enumerate().map(of).collect()
}

/// Leaves out columns, from the right, that have no room even if all are as narrow as may be: half a number would be
/// worse than none. Then takes from the widest columns of text until all fit.
fn fit(natural: &[u16], columns: &[Column], room: u16) -> Vec<u16> {
    let least = |(w, c): (&u16, &Column)| match c.kind {
        Kind::Number => *w,
        Kind::Text | Kind::Address => (*w).min(NARROWEST),
    };
    let sum = |widths: &[u16]| {
        let gaps = widths.len().saturating_sub(1);
        gaps + widths.iter().map(|w| usize::from(*w)).sum::<usize>()
    };
    let least: Vec<u16> = natural.iter().zip(columns).map(least).collect();
    let fits = |n: &usize| sum(&least[..*n]) <= room.into();
    let n = (1..=least.len()).rev().find(fits).unwrap_or(1);
    let mut widths = natural[..n].to_vec();
    while sum(&widths) > room.into() {
        let all = widths.iter().zip(&least).enumerate();
        let wide = all.filter(|(_, (w, least))| w > least);
        match wide.max_by_key(|(_, (w, _))| **w) {
            Some((n, _)) => widths[n] -= 1,
            None => break,
        }
    }
    widths
}

fn help(f: &mut Frame<'_>, area: Rect) {
    let width = HELP.lines().map(str::len).max().unwrap_or(0) + 4;
    let height = HELP.lines().count() + 2;
    let size = |n: usize, of: u16| u16::try_from(n).map_or(of, |n| n.min(of));
    let middle = area.centered(
        Constraint::Length(size(width, area.width)),
        Constraint::Length(size(height, area.height)),
    );
    f.render_widget(Clear, middle);
    let block = Block::bordered().title(" Help: any key goes back ");
    let text = HELP.lines().map(|l| text::Line::from(format!(" {l}")));
    f.render_widget(
        Paragraph::new(text.collect::<Vec<_>>()).block(block),
        middle,
    );
}

/// The same for a program, or a page: whole, and as wide as it is.
pub fn text(s: &State) -> String {
    let columns = s.view.columns();
    let widths = natural(columns, s.lines());
    let mut t = format!("{}; {}\n", daemon(s), s.sums());
    let mut line = |cells: Vec<&str>| {
        let mut l = String::new();
        for ((c, cell), w) in columns.iter().zip(cells).zip(&widths) {
            let pad = usize::from(*w).saturating_sub(Span::from(cell).width());
            let pad = " ".repeat(pad);
            match c.kind {
                Kind::Number => l.push_str(&format!("{pad}{cell} ")),
                Kind::Text | Kind::Address => l.push_str(&format!("{cell}{pad} ")),
            }
        }
        t.push_str(l.trim_end());
        t.push('\n');
    };
    line(columns.iter().map(|c| c.head).collect());
    for l in s.lines() {
        line(l.cells.iter().map(|c| c.text.as_str()).collect());
    }
    if s.lines().is_empty() {
        t.push_str(&format!("{}\n", s.nothing()));
    }
    t
}

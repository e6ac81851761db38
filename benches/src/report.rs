//! The table: printed for people, written as JSON for tools.

use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub case: String,
    pub unit: String,
    pub tcp: Option<f64>,
    pub unix: Option<f64>,
    pub underpass: Option<f64>,
    pub limit: Option<f64>,
    /// More than 1 is better than TCP, whether the unit is a rate or a time.
    pub ratio_vs_tcp: Option<f64>,
    /// 1 is as good as bare shared memory.
    pub ratio_vs_limit: Option<f64>,
}

impl Row {
    /// `time`: the unit is one where less is better.
    pub fn finish(mut self, time: bool) -> Self {
        let ratio = |ours: Option<f64>, other: Option<f64>| {
            let (o, r) = (ours?, other?);
            Some(if time { r / o } else { o / r }).filter(|x| x.is_finite())
        };
        self.ratio_vs_tcp = ratio(self.underpass, self.tcp);
        self.ratio_vs_limit = ratio(self.underpass, self.limit);
        self
    }
}

/// The middle value, or the mean of the two in the middle.
pub fn median(mut v: Vec<f64>) -> Option<f64> {
    v.sort_by(f64::total_cmp);
    let n = v.len();
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(v[n / 2]),
        _ => Some((v[n / 2 - 1] + v[n / 2]) / 2.0),
    }
}

/// Four significant digits, thousands as k, M.
pub fn short(x: Option<f64>) -> String {
    let Some(x) = x else { return "-".into() };
    let (x, suffix) = match x {
        x if x >= 1e7 => (x / 1e6, " M"),
        x if x >= 1e4 => (x / 1e3, " k"),
        x => (x, ""),
    };
    let digits = match x {
        x if x >= 100.0 => 0,
        x if x >= 10.0 => 1,
        x if x >= 1.0 => 2,
        _ => 3,
    };
    format!("{x:.digits$}{suffix}")
}

pub fn head() -> String {
    format!(
        "{:<34}{:>10}{:>10}{:>10}{:>11}{:>10}{:>9}{:>10}",
        "case", "unit", "TCP", "Unix", "Underpass", "limit", "vs TCP", "vs limit"
    )
}

pub fn line(r: &Row) -> String {
    let times = |x: Option<f64>| x.map_or("-".into(), |x| format!("{}x", short(Some(x))));
    let percent = |x: Option<f64>| x.map_or("-".into(), |x| format!("{:.0} %", x * 100.0));
    format!(
        "{:<34}{:>10}{:>10}{:>10}{:>11}{:>10}{:>9}{:>10}",
        r.case,
        r.unit,
        short(r.tcp),
        short(r.unix),
        short(r.underpass),
        short(r.limit),
        times(r.ratio_vs_tcp),
        percent(r.ratio_vs_limit)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_better_above_one() {
        let r = Row {
            case: "c".into(),
            unit: "us".into(),
            tcp: Some(80.0),
            unix: None,
            underpass: Some(2.0),
            limit: Some(1.0),
            ratio_vs_tcp: None,
            ratio_vs_limit: None,
        };
        let t = r.clone().finish(true);
        assert_eq!((t.ratio_vs_tcp, t.ratio_vs_limit), (Some(40.0), Some(0.5)));
        let t = r.finish(false);
        assert_eq!((t.ratio_vs_tcp, t.ratio_vs_limit), (Some(0.025), Some(2.0)));
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn short_numbers() {
        assert_eq!(short(Some(0.2)), "0.200");
        assert_eq!(short(Some(81.25)), "81.2");
        assert_eq!(short(Some(734_000.0)), "734 k");
        assert_eq!(short(None), "-");
    }
}

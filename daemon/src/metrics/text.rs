//! Series, and their text in OpenMetrics' form or in Prometheus' older one.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    prometheus_text, text, DescriptorEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Labels by name; values may be anything.
pub(super) type Labels = Vec<(&'static str, String)>;

/// Exact up to 2^53, as all numbers are that Prometheus stores.
#[allow(clippy::cast_precision_loss)]
pub(super) fn float(n: u64) -> f64 {
    n as f64
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A counter that must not go back, whatever it is made of: see [`Highest`].
    Count(u64),
    /// One that may start again, as that of a device that is replaced.
    Foreign(u64),
    Seconds(f64),
    Gauge(f64),
    /// Sum, and upper limits with how many are above the last one.
    Histogram(f64, Vec<(f64, u64)>),
}

/// The series of one name.
#[derive(Clone, Debug)]
pub(super) struct Metric {
    /// Without `_total`.
    pub name: String,
    pub help: &'static str,
    pub series: Vec<(Labels, Value)>,
}

impl Metric {
    pub(super) fn new(name: &str, help: &'static str) -> Metric {
        Metric {
            name: name.to_owned(),
            help,
            series: Vec::new(),
        }
    }

    pub(super) fn with(mut self, labels: &[(&'static str, &str)], value: Value) -> Metric {
        let labels = labels.iter().map(|(k, v)| (*k, (*v).to_owned()));
        self.series.push((labels.collect(), value));
        self
    }

    fn kind(&self) -> MetricType {
        match self.series.first().map(|s| &s.1) {
            Some(Value::Count(_) | Value::Foreign(_) | Value::Seconds(_)) => MetricType::Counter,
            Some(Value::Histogram(..)) => MetricType::Histogram,
            Some(Value::Gauge(_)) | None => MetricType::Gauge,
        }
    }
}

/// What counters showed last. A table that a process writes may say less than before, and a monitor would take that for a
/// new start and count everything once more.
#[derive(Default)]
pub(super) struct Highest(BTreeMap<(String, Labels), u64>);

impl Highest {
    pub(super) fn keep(&mut self, all: &mut [Metric]) {
        let before = std::mem::take(&mut self.0);
        for m in all {
            for (labels, value) in &mut m.series {
                if let Value::Count(n) = value {
                    let key = (m.name.clone(), labels.clone());
                    *n = before.get(&key).map_or(*n, |b| *b.max(n));
                    self.0.insert(key, *n);
                }
            }
        }
    }
}

#[derive(Debug)]
struct Metrics(Mutex<Vec<Metric>>);

impl Collector for Metrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let all = self.0.lock().map_err(|_| std::fmt::Error)?;
        for m in all.iter().filter(|m| !m.series.is_empty()) {
            let mut at = to.encode_descriptor(&m.name, m.help, None, m.kind())?;
            for (labels, value) in &m.series {
                match labels.is_empty() {
                    true => encode(value, &mut at)?,
                    false => encode(value, &mut at.encode_family(labels)?)?,
                }
            }
        }
        Ok(())
    }
}

fn encode(value: &Value, at: &mut MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
    match value {
        Value::Count(n) | Value::Foreign(n) => at.encode_counter::<NoLabelSet, _, u64>(n, None),
        Value::Seconds(n) => at.encode_counter::<NoLabelSet, _, u64>(n, None),
        Value::Gauge(n) => at.encode_gauge(n),
        Value::Histogram(sum, parts) => {
            let count = parts.iter().map(|p| p.1).sum();
            at.encode_histogram::<NoLabelSet>(*sum, count, parts, None)
        }
    }
}

/// The two forms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    OpenMetrics,
    Prometheus,
}

impl Form {
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Form::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Form::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

pub(super) fn write(all: Vec<Metric>, form: Form) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics(Mutex::new(all))));
    let mut out = String::new();
    match form {
        Form::OpenMetrics => text::encode(&mut out, &registry)?,
        Form::Prometheus => prometheus_text::encode(&mut out, &registry)?,
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms() {
        let hostile = "a\"b\\c\nd";
        let all = || {
            vec![
                Metric::new("x_bytes", "Bytes")
                    .with(&[("d", hostile)], Value::Count(7))
                    .with(&[("d", "")], Value::Count(8)),
                Metric::new("none", "Nothing"),
                Metric::new("h_seconds", "Times").with(
                    &[],
                    Value::Histogram(1.5, vec![(0.1, 2), (f64::INFINITY, 1)]),
                ),
                Metric::new("g", "Now").with(&[], Value::Gauge(2.0)),
            ]
        };
        let open = write(all(), Form::OpenMetrics).unwrap();
        assert!(
            open.contains("x_bytes_total{d=\"a\\\"b\\\\c\\nd\"} 7\n"),
            "{open}"
        );
        assert!(open.contains("# TYPE x_bytes counter\n") && open.ends_with("# EOF\n"));
        assert!(open.contains("h_seconds_bucket{le=\"0.1\"} 2\n"), "{open}");
        assert!(open.contains("h_seconds_bucket{le=\"+Inf\"} 3\n"), "{open}");
        assert!(open.contains("h_seconds_count 3\n") && !open.contains("none"));
        let old = write(all(), Form::Prometheus).unwrap();
        assert!(old.contains("# TYPE x_bytes_total counter\n"), "{old}");
        assert!(old.contains("x_bytes_total{d=\"\"} 8\n") && !old.contains("EOF"));
    }

    #[test]
    fn counters_do_not_go_back() {
        let mut highest = Highest::default();
        let mut show = |n, value: fn(u64) -> Value| {
            let mut all = vec![Metric::new("x", "").with(&[], value(n))];
            highest.keep(&mut all);
            all.remove(0).series.remove(0).1
        };
        assert_eq!(show(5, Value::Count), Value::Count(5));
        assert_eq!(show(3, Value::Count), Value::Count(5));
        assert_eq!(show(6, Value::Count), Value::Count(6));
        assert_eq!(show(2, Value::Foreign), Value::Foreign(2));
        assert_eq!(show(1, Value::Count), Value::Count(1), "it had gone");
    }
}

//! The metrics page in Prometheus's protobuf format, the only one with native histograms.
//!
//! The messages are those of `io/prometheus/client/metrics.proto` of prometheus/client_model, without the fields that
//! are not sent.

use prometheus::proto::{self, MetricType};
use prost::Message;

use super::latency::{self, NativeCounts};

/// The content type of the page.
pub const FORMAT: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";

/// Returns whether a scraper that sends this `Accept` header prefers the protobuf format to text.
pub fn is_preferred(accept: &str) -> bool {
    let quality = |wanted: fn(&str) -> bool| {
        let ranges = accept.split(',').map(str::trim).filter(|range| wanted(range));
        ranges.map(quality).fold(0.0, f64::max)
    };
    let protobuf = quality(|range| {
        range.starts_with("application/vnd.google.protobuf") && range.contains("encoding=delimited")
    });
    let text =
        quality(|range| range.starts_with("text/") || range.starts_with("application/openmetrics-text"));
    protobuf > text
}

/// The weight of one media range: the parameter `q`, or 1.
fn quality(range: &str) -> f64 {
    let weight = range.split(';').find_map(|parameter| parameter.trim().strip_prefix("q="));
    weight.and_then(|weight| weight.parse().ok()).unwrap_or(1.0)
}

/// Encodes the families, each with its length before it. `native` returns the native counts of a histogram.
pub(super) fn encode(
    families: &[proto::MetricFamily],
    native: impl Fn(&str, &[proto::LabelPair]) -> Option<NativeCounts>,
) -> Vec<u8> {
    let mut page = Vec::new();
    for family in families {
        let message = MetricFamily::of(family, &native);
        message.encode_length_delimited(&mut page).expect("a vector grows");
    }
    page
}

#[derive(Clone, PartialEq, Message)]
struct MetricFamily {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    help: String,
    /// Always sent, because a counter's kind is 0.
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
    #[prost(message, repeated, tag = "4")]
    metrics: Vec<Metric>,
}

#[derive(Clone, PartialEq, Message)]
struct Metric {
    #[prost(message, repeated, tag = "1")]
    labels: Vec<LabelPair>,
    #[prost(message, optional, tag = "2")]
    gauge: Option<Value>,
    #[prost(message, optional, tag = "3")]
    counter: Option<Value>,
    #[prost(message, optional, tag = "7")]
    histogram: Option<Histogram>,
}

#[derive(Clone, PartialEq, Message)]
struct LabelPair {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(double, optional, tag = "1")]
    value: Option<f64>,
}

#[derive(Clone, PartialEq, Message)]
struct Histogram {
    #[prost(uint64, optional, tag = "1")]
    count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    sum: Option<f64>,
    #[prost(message, repeated, tag = "3")]
    buckets: Vec<Bucket>,
    #[prost(sint32, optional, tag = "5")]
    schema: Option<i32>,
    #[prost(double, optional, tag = "6")]
    zero_threshold: Option<f64>,
    #[prost(uint64, optional, tag = "7")]
    zero_count: Option<u64>,
    #[prost(message, repeated, tag = "12")]
    positive_spans: Vec<BucketSpan>,
    /// The difference of each count to that of the previous bucket.
    #[prost(sint64, repeated, packed = "false", tag = "13")]
    positive_deltas: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Bucket {
    #[prost(uint64, optional, tag = "1")]
    cumulative_count: Option<u64>,
    #[prost(double, optional, tag = "2")]
    upper_bound: Option<f64>,
}

/// Buckets without a gap between them.
#[derive(Clone, PartialEq, Message)]
struct BucketSpan {
    /// The number of empty buckets after the previous span. For the first span, the index of its first bucket.
    #[prost(sint32, optional, tag = "1")]
    offset: Option<i32>,
    #[prost(uint32, optional, tag = "2")]
    length: Option<u32>,
}

impl MetricFamily {
    fn of(
        family: &proto::MetricFamily,
        native: &impl Fn(&str, &[proto::LabelPair]) -> Option<NativeCounts>,
    ) -> Self {
        let kind = family.get_field_type();
        let metrics = family.get_metric().iter();
        let metrics =
            metrics.map(|metric| Metric::of(metric, kind, native(family.name(), metric.get_label())));
        Self {
            name: family.name().to_owned(),
            help: family.help().to_owned(),
            kind: Some(match kind {
                MetricType::COUNTER => 0,
                MetricType::GAUGE => 1,
                MetricType::SUMMARY => 2,
                MetricType::UNTYPED => 3,
                MetricType::HISTOGRAM => 4,
            }),
            metrics: metrics.collect(),
        }
    }
}

impl Metric {
    fn of(metric: &proto::Metric, kind: MetricType, native: Option<NativeCounts>) -> Self {
        let pair = |pair: &proto::LabelPair| LabelPair {
            name: pair.name().to_owned(),
            value: pair.value().to_owned(),
        };
        let labels = metric.get_label().iter().map(pair).collect();
        let mut made = Self { labels, ..Self::default() };
        match kind {
            MetricType::COUNTER => {
                made.counter = Some(Value { value: Some(metric.get_counter().get_value()) })
            }
            MetricType::GAUGE => made.gauge = Some(Value { value: Some(metric.get_gauge().get_value()) }),
            MetricType::HISTOGRAM => {
                let fixed = Histogram::of(metric.get_histogram());
                made.histogram = Some(match native {
                    Some(counts) => fixed.with_native(&counts),
                    None => fixed,
                });
            }
            MetricType::SUMMARY | MetricType::UNTYPED => unreachable!("no process registers one"),
        }
        made
    }
}

impl Histogram {
    fn of(fixed: &proto::Histogram) -> Self {
        let bucket = |bucket: &proto::Bucket| Bucket {
            cumulative_count: Some(bucket.cumulative_count()),
            upper_bound: Some(bucket.upper_bound()),
        };
        Self {
            count: Some(fixed.get_sample_count()),
            sum: Some(fixed.get_sample_sum()),
            buckets: fixed.get_bucket().iter().map(bucket).collect(),
            ..Self::default()
        }
    }

    /// Adds the native buckets. The count becomes that of the native buckets, because Prometheus refuses a histogram
    /// whose buckets do not add up, and a time may be observed between the two reads.
    fn with_native(mut self, counts: &NativeCounts) -> Self {
        let count = counts.zero + counts.positive.iter().map(|(_, count)| count).sum::<u64>();
        for bucket in &mut self.buckets {
            bucket.cumulative_count = bucket.cumulative_count.map(|cumulative| cumulative.min(count));
        }
        let (mut before, mut next) = (0, 0);
        for &(index, n) in &counts.positive {
            match self.positive_spans.last_mut() {
                Some(span) if index == next => span.length = span.length.map(|length| length + 1),
                _ => self.positive_spans.push(BucketSpan { offset: Some(index - next), length: Some(1) }),
            }
            self.positive_deltas.push(n as i64 - before);
            (before, next) = (n as i64, index + 1);
        }
        if self.positive_spans.is_empty() {
            // Tells an empty native histogram from one without native buckets.
            self.positive_spans.push(BucketSpan { offset: Some(0), length: Some(0) });
        }
        Self {
            count: Some(count),
            schema: Some(latency::SCHEMA),
            zero_threshold: Some(latency::ZERO_THRESHOLD),
            zero_count: Some(counts.zero),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_accept_header_chooses() {
        let protobuf =
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
        let text =
            "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        let cases = [
            (String::new(), false),
            ("*/*".to_owned(), false),
            (text.to_owned(), false),
            (protobuf.to_owned(), true),
            (format!("{protobuf};q=0.6,{text}"), true),
            (format!("{text},{protobuf};q=0.4"), false),
            ("application/vnd.google.protobuf;encoding=text".to_owned(), false),
        ];
        for (accept, expected) in cases {
            assert_eq!(is_preferred(&accept), expected, "{accept}");
        }
    }

    #[test]
    fn buckets_are_sent_as_spans_and_differences() {
        let fixed = Histogram {
            buckets: vec![Bucket { cumulative_count: Some(9), upper_bound: Some(1.0) }],
            ..Histogram::default()
        };
        let counts = NativeCounts { zero: 1, positive: vec![(-3, 2), (-2, 5), (4, 1)] };
        let made = fixed.with_native(&counts);
        assert_eq!((made.count, made.zero_count), (Some(9), Some(1)));
        let spans: Vec<_> = made.positive_spans.iter().map(|span| (span.offset, span.length)).collect();
        assert_eq!(spans, [(Some(-3), Some(2)), (Some(5), Some(1))]);
        assert_eq!(made.positive_deltas, [2, 3, -4]);
        let empty = Histogram::default().with_native(&NativeCounts::default());
        assert_eq!((empty.count, empty.positive_spans.len()), (Some(0), 1));
    }
}

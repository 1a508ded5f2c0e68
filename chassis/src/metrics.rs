//! The metrics of one process, in a registry that is passed as a value; there is no global one.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec,
    Opts, Registry, TextEncoder,
};

use crate::identity::refusals::{Refusals, RefusalsOnPage};

pub use prometheus;

/// Buckets in seconds for all latencies of a request: 0.5 ms to 60 s, three per decade.
pub const LATENCY_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// Buckets for sizes in bytes: 1 KiB to 4 GiB, by factors of four.
pub const BYTES_BUCKETS: &[f64] = &[
    1024.0,
    4096.0,
    16384.0,
    65536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
    268_435_456.0,
    1_073_741_824.0,
    4_294_967_296.0,
];

/// A process's metrics. Clones share one registry.
///
/// Each crate has one struct of metrics, made from this value at start. Names are given without prefix:
/// `counter("requests_total", …)` in the router is `baton_router_requests_total`. Names follow
/// `<thing>_<unit>[_total]`. Counters, and only they, end in `_total`.
///
/// # Panics
///
/// Every constructor of a metric panics if the name is taken or malformed. Both are bugs that show at start.
#[derive(Clone, Debug)]
pub struct Metrics {
    process: &'static str,
    registry: Registry,
    vectors: Arc<Mutex<Vec<Vector>>>,
}

/// The description of a metric with labels, for [`Metrics::page`]: the registry has no line for it before a
/// label is used.
#[derive(Debug)]
struct Vector {
    name: String,
    help: String,
    kind: &'static str,
}

impl Metrics {
    /// Makes an empty registry. `process` is the role and part of every name: `router`, `prefill`, `decode`,
    /// …
    pub fn new(process: &'static str) -> Self {
        Self { process, registry: Registry::new(), vectors: Arc::default() }
    }

    /// Makes the registry of a whole process, including the metrics of its log.
    pub fn of_process(process: &'static str) -> Self {
        let metrics = Self::new(process);
        let opts = metrics.total("log_lines_lost_total", "Log lines lost because the log was not read.");
        let counter = IntCounter::with_opts(opts.clone()).expect("the name is well-formed");
        metrics.registry.register(Box::new(LostLines { opts, counter })).expect("the name is taken once");
        metrics
    }

    /// Adds the counts of refused callers to the metrics page.
    pub fn show_refusals(&self, refusals: &Refusals) {
        let opts = self.total("callers_refused_total", "Calls, KV links, registry entries and admin pages refused because the caller did not prove its identity, by reason.");
        self.declare(&opts, "counter");
        let on_page = RefusalsOnPage::new(refusals.clone(), opts);
        self.registry.register(Box::new(on_page)).expect("the name is taken once");
    }

    pub fn counter(&self, name: &str, help: &str) -> IntCounter {
        self.register(IntCounter::with_opts(self.total(name, help)))
    }

    pub fn counter_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
        let opts = self.total(name, help);
        self.declare(&opts, "counter");
        self.register(IntCounterVec::new(opts, labels))
    }

    pub fn gauge(&self, name: &str, help: &str) -> IntGauge {
        self.register(IntGauge::with_opts(self.opts(name, help)))
    }

    pub fn gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        let opts = self.opts(name, help);
        self.declare(&opts, "gauge");
        self.register(IntGaugeVec::new(opts, labels))
    }

    /// Adds a gauge for ratios and seconds.
    pub fn float_gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.opts(name, help)))
    }

    pub fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Histogram {
        self.register(Histogram::with_opts(self.histogram_opts(name, help, buckets)))
    }

    pub fn histogram_vec(&self, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
        let opts = self.histogram_opts(name, help, buckets);
        self.declare(&opts.common_opts, "histogram");
        self.register(HistogramVec::new(opts, labels))
    }

    /// Adds a histogram in seconds, with [`LATENCY_BUCKETS`].
    pub fn latency(&self, name: &str, help: &str) -> Histogram {
        self.histogram(name, help, LATENCY_BUCKETS)
    }

    /// Adds a histogram in seconds by label, with [`LATENCY_BUCKETS`].
    pub fn latency_vec(&self, name: &str, help: &str, labels: &[&str]) -> HistogramVec {
        self.histogram_vec(name, help, LATENCY_BUCKETS, labels)
    }

    /// Returns the metrics page in Prometheus's text format.
    pub fn page(&self) -> String {
        let mut page = Vec::new();
        let families = self.registry.gather();
        TextEncoder::new().encode(&families, &mut page).expect("writing to memory does not fail");
        let mut page = String::from_utf8_lossy(&page).into_owned();
        for Vector { name, help, kind } in self.vectors.lock().unwrap_or_else(PoisonError::into_inner).iter()
        {
            if families.iter().all(|family| family.name() != name) {
                writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes all");
            }
        }
        page
    }

    /// Returns the full names of all metrics that have a value. A vector has one after its first label is
    /// used.
    pub fn names(&self) -> Vec<String> {
        self.registry.gather().iter().map(|family| family.name().to_owned()).collect()
    }

    fn total(&self, name: &str, help: &str) -> Opts {
        assert!(name.ends_with("_total"), "the counter `{name}` must end in `_total`");
        Opts::new(self.full_name(name), help)
    }

    fn opts(&self, name: &str, help: &str) -> Opts {
        assert!(!name.ends_with("_total"), "`{name}` is not a counter");
        Opts::new(self.full_name(name), help)
    }

    fn histogram_opts(&self, name: &str, help: &str, buckets: &[f64]) -> HistogramOpts {
        HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() }
    }

    fn full_name(&self, name: &str) -> String {
        format!("baton_{}_{name}", self.process)
    }

    fn declare(&self, opts: &Opts, kind: &'static str) {
        let vector = Vector { name: opts.name.clone(), help: opts.help.clone(), kind };
        self.vectors.lock().unwrap_or_else(PoisonError::into_inner).push(vector);
    }

    fn register<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("a metric's name is well-formed");
        self.registry.register(Box::new(metric.clone())).expect("a metric's name is taken once");
        metric
    }
}

/// The collector that puts the number of lost log lines on the page.
struct LostLines {
    opts: Opts,
    /// A counter that describes the metric and stays at zero: each page fills a counter of its own.
    counter: IntCounter,
}

impl Collector for LostLines {
    fn desc(&self) -> Vec<&Desc> {
        self.counter.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let counter = IntCounter::with_opts(self.opts.clone()).expect("the name is well-formed");
        counter.inc_by(crate::telemetry::lost_lines());
        counter.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_prometheus_text() {
        let metrics = Metrics::new("router");
        metrics.counter_vec("requests_total", "Requests.", &["code"]).with_label_values(&["200"]).inc_by(2);
        metrics.gauge("running", "Requests under way.").set(3);
        metrics.histogram("ttft_seconds", "To the first token.", &[0.1, 1.0]).observe(0.5);
        let expected = "\
# HELP baton_router_requests_total Requests.
# TYPE baton_router_requests_total counter
baton_router_requests_total{code=\"200\"} 2
# HELP baton_router_running Requests under way.
# TYPE baton_router_running gauge
baton_router_running 3
# HELP baton_router_ttft_seconds To the first token.
# TYPE baton_router_ttft_seconds histogram
baton_router_ttft_seconds_bucket{le=\"0.1\"} 0
baton_router_ttft_seconds_bucket{le=\"1\"} 1
baton_router_ttft_seconds_bucket{le=\"+Inf\"} 1
baton_router_ttft_seconds_sum 0.5
baton_router_ttft_seconds_count 1
";
        assert_eq!(metrics.page(), expected);
        assert_eq!(metrics.names().len(), 3);
    }

    #[test]
    fn a_vector_without_values_is_on_the_page() {
        let metrics = Metrics::new("router");
        let retries = metrics.counter_vec("retries_total", "Retries.", &["reason"]);
        let head = "# HELP baton_router_retries_total Retries.\n# TYPE baton_router_retries_total counter\n";
        assert_eq!(metrics.page(), head);
        retries.with_label_values(&["full"]).inc();
        assert_eq!(metrics.page(), format!("{head}baton_router_retries_total{{reason=\"full\"}} 1\n"));
    }

    #[test]
    fn processes_do_not_share_a_registry() {
        for process in ["prefill", "decode"] {
            let metrics = Metrics::new(process);
            metrics.latency("step_seconds", "One step.").observe(1.0);
            assert_eq!(metrics.names(), [format!("baton_{process}_step_seconds")]);
        }
    }

    #[test]
    #[should_panic(expected = "taken once")]
    fn a_name_is_taken_once() {
        let metrics = Metrics::new("router");
        metrics.gauge("running", "One.");
        metrics.gauge("running", "Two.");
    }

    #[test]
    #[should_panic(expected = "must end in `_total`")]
    fn counters_say_so() {
        Metrics::new("router").counter("requests", "Requests.");
    }

    #[test]
    fn buckets_rise() {
        for buckets in [LATENCY_BUCKETS, BYTES_BUCKETS] {
            assert!(buckets.is_sorted_by(|a, b| a < b));
        }
    }
}

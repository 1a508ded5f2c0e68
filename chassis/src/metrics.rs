//! The metrics of one process, in a registry that is passed as a value; there is no global one.

mod latency;
mod protobuf;

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::{LabelPair, MetricFamily};
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    IntGaugeVec, Opts, Registry, TextEncoder,
};

use crate::identity::certificate::Expiry;
use crate::identity::refusals::{Refusals, RefusalsOnPage};
use crate::process_usage::UsageOnPage;

pub use latency::{LatencyHistogram, LatencyHistogramVec};
pub use prometheus;
pub use protobuf::{FORMAT as PROTOBUF_FORMAT, is_preferred as is_protobuf_preferred};

/// Buckets in seconds for all latencies of a request: 0.5 ms to 60 s, three per decade.
pub const LATENCY_BUCKETS: &[f64] =
    &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];

/// Buckets in seconds for the waits of clients, for the first token and between tokens: steps of 5 ms up to
/// 50 ms, where most gaps are.
pub const TOKEN_BUCKETS: &[f64] = &[
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0,
];

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
/// Every line of a node's page has the label `role`: the role of the node now, because a node may wake in
/// another one.
///
/// # Panics
///
/// Every constructor of a metric panics if the name is taken or malformed. Both are bugs that show at start.
#[derive(Clone, Debug)]
pub struct Metrics {
    process: &'static str,
    registry: Registry,
    vectors: Arc<Mutex<Vec<Vector>>>,
    /// The value of the label `role`, on a node. Locked for one look-up or change.
    role: Option<Arc<Mutex<&'static str>>>,
    refreshes: Arc<Mutex<Vec<Refresh>>>,
    aliases: Arc<Mutex<Vec<Alias>>>,
    latencies: Arc<Mutex<Vec<Latency>>>,
}

/// A histogram that the protobuf page shows as a native one too.
#[derive(Debug)]
struct Latency {
    name: String,
    label: String,
    histograms: LatencyHistogramVec,
}

/// Sets gauges before a page is made.
struct Refresh(Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for Refresh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Refresh")
    }
}

/// A second name of a metric on the page, in which one label has another name too.
#[derive(Clone, Copy, Debug)]
pub struct Alias {
    /// The metric's name without prefix.
    pub of: &'static str,
    /// The whole second name.
    pub name: &'static str,
    /// A label's own name, and its name in the second metric.
    pub label: (&'static str, &'static str),
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
    /// Makes an empty registry. `process` is a part of every name: `router` or `node`.
    pub fn new(process: &'static str) -> Self {
        Self {
            process,
            registry: Registry::new(),
            vectors: Arc::default(),
            role: None,
            refreshes: Arc::default(),
            aliases: Arc::default(),
            latencies: Arc::default(),
        }
    }

    /// Makes the registry of a whole process, including the metrics of its log, its memory and its version.
    pub fn of_process(process: &'static str) -> Self {
        let metrics = Self::new(process);
        let opts = metrics.total("log_lines_lost_total", "Log lines that standard error did not take.");
        let counter = IntCounter::with_opts(opts.clone()).expect("the name is well-formed");
        metrics.add(LostLines { opts, counter });
        metrics.add(UsageOnPage::new());
        let build = Opts::new("baton_build_info", "1, with the version of the process as a label.");
        let build = build.const_label("process", process).const_label("version", env!("CARGO_PKG_VERSION"));
        metrics.register(IntGauge::with_opts(build)).set(1);
        metrics
    }

    /// Makes the registry of a whole node. Every line of its page has the role as a label.
    pub fn of_node(role: &'static str) -> Self {
        Self { role: Some(Arc::new(Mutex::new(role))), ..Self::of_process("node") }
    }

    /// Sets the label `role` of a node's page. Without effect on other pages.
    pub fn set_role(&self, role: &'static str) {
        if let Some(own) = &self.role {
            *locked(own) = role;
        }
    }

    /// Adds the counts of refused callers to the metrics page.
    pub fn show_refusals(&self, refusals: &Refusals) {
        let opts = self.total("callers_refused_total", "Calls, KV links, registry entries and admin pages refused because the caller did not prove its identity, by reason.");
        self.declare(&opts, "counter");
        self.add(RefusalsOnPage::new(refusals.clone(), opts));
    }

    /// Adds the ends of certificates' validity. `read` returns them with the names of their settings.
    pub fn show_certificates(&self, read: impl Fn() -> Vec<Expiry> + Send + Sync + 'static) {
        let help = "End of the validity of a certificate, in Unix time.";
        let ends = self.gauge_vec("certificate_expiry_timestamp_seconds", help, &["setting"]);
        self.before_page(move || {
            for Expiry { setting, end } in read() {
                ends.with_label_values(&[setting]).set(end.as_secs() as i64);
            }
        });
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

    /// Adds a gauge under another program's name, without prefix.
    pub fn foreign_gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
        let opts = Opts::new(name, help);
        self.declare(&opts, "gauge");
        self.register(IntGaugeVec::new(opts, labels))
    }

    /// Adds a second name of a metric to the page.
    pub fn alias(&self, alias: Alias) {
        locked(&self.aliases).push(alias);
    }

    /// `refresh` sets gauges whenever a page is made. It must not hold this value.
    pub fn before_page(&self, refresh: impl Fn() + Send + Sync + 'static) {
        locked(&self.refreshes).push(Refresh(Box::new(refresh)));
    }

    /// Adds a gauge for ratios and seconds.
    pub fn float_gauge(&self, name: &str, help: &str) -> Gauge {
        self.register(Gauge::with_opts(self.opts(name, help)))
    }

    /// Adds a gauge for ratios and measured quantities, by label.
    pub fn float_gauge_vec(&self, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
        let opts = self.opts(name, help);
        self.declare(&opts, "gauge");
        self.register(GaugeVec::new(opts, labels))
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

    /// Adds a histogram of clients' waits, by one label, with [`TOKEN_BUCKETS`] and as a native histogram.
    pub fn token_latency_vec(&self, name: &str, help: &str, label: &str) -> LatencyHistogramVec {
        let histograms = LatencyHistogramVec::new(self.histogram_vec(name, help, TOKEN_BUCKETS, &[label]));
        let (name, label) = (self.full_name(name), label.to_owned());
        locked(&self.latencies).push(Latency { name, label, histograms: histograms.clone() });
        histograms
    }

    /// Returns the metrics page in Prometheus's protobuf format.
    pub fn protobuf_page(&self) -> Vec<u8> {
        protobuf::encode(&self.families(), |name, labels| {
            let latencies = locked(&self.latencies);
            let latency = latencies.iter().find(|latency| latency.name == name)?;
            let value = labels.iter().find(|pair| pair.name() == latency.label)?.value();
            latency.histograms.counts(&[value])
        })
    }

    /// Returns the metrics page in Prometheus's text format.
    pub fn page(&self) -> String {
        let families = self.families();
        let mut page = Vec::new();
        TextEncoder::new().encode(&families, &mut page).expect("writing to memory does not fail");
        let mut page = String::from_utf8_lossy(&page).into_owned();
        for Vector { name, help, kind } in locked(&self.vectors).iter() {
            if families.iter().all(|family| family.name() != name) {
                writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}").expect("a string takes all");
            }
        }
        page
    }

    /// Returns all metrics that have a value, with the label of the role and under their second names too.
    fn families(&self) -> Vec<MetricFamily> {
        locked(&self.refreshes).iter().for_each(|refresh| refresh.0());
        let mut families = self.registry.gather();
        if let Some(role) = &self.role {
            let role = *locked(role);
            families.iter_mut().for_each(|family| add_label(family, "role", role));
        }
        for alias in locked(&self.aliases).iter() {
            let own = self.full_name(alias.of);
            let named = families.iter().find(|family| family.name() == own).map(|family| alias.of(family));
            families.extend(named);
        }
        families
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
        locked(&self.vectors).push(vector);
    }

    fn register<C: Collector + Clone + 'static>(&self, metric: prometheus::Result<C>) -> C {
        let metric = metric.expect("a metric's name is well-formed");
        self.add(metric.clone());
        metric
    }

    fn add(&self, metric: impl Collector + 'static) {
        self.registry.register(Box::new(metric)).expect("a metric's name is taken once");
    }
}

impl Alias {
    fn of(&self, family: &MetricFamily) -> MetricFamily {
        let mut family = family.clone();
        family.set_name(self.name.to_owned());
        let labels = family.mut_metric().iter_mut().flat_map(|metric| metric.mut_label());
        labels
            .filter(|pair| pair.name() == self.label.0)
            .for_each(|pair| pair.set_name(self.label.1.to_owned()));
        family
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a label to every line of a metric, in the order of the labels' names.
fn add_label(family: &mut MetricFamily, name: &str, value: &str) {
    for metric in family.mut_metric() {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        let mut labels = metric.take_label();
        labels.push(pair);
        labels.sort_by(|a, b| a.name().cmp(b.name()));
        metric.set_label(labels);
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
    fn the_protobuf_page_has_native_buckets() {
        let metrics = Metrics::new("router");
        let latency = metrics.token_latency_vec("gap_seconds", "Gaps.", "model").with_label_values(&["m"]);
        latency.observe(0.5);
        let (text, page) = (metrics.page(), metrics.protobuf_page());
        assert!(text.contains("baton_router_gap_seconds_count{model=\"m\"} 1"), "{text}");
        // Fields 5 to 7 (schema 3, threshold, nothing at zero), and 12 and 13: one bucket, index -8, with one time.
        let native = [0x28, 6, 0x31, 0, 0, 0, 0, 0, 0, 0xe0, 0x3e, 0x38, 0, 0x62, 4, 8, 15, 0x10, 1, 0x68, 2];
        assert!(page.windows(native.len()).any(|window| window == native), "{page:x?}");
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
    fn a_node_counts_as_what_it_is() {
        let metrics = Metrics::of_node("prefill");
        let states = metrics.gauge_vec("kv_blocks", "Blocks.", &["state"]);
        states.with_label_values(&["free"]).set(4);
        let line = |role: &str| format!("baton_node_kv_blocks{{role=\"{role}\",state=\"free\"}} 4\n");
        assert!(metrics.page().contains(&line("prefill")), "{}", metrics.page());
        metrics.clone().set_role("decode");
        let page = metrics.page();
        assert!(page.contains(&line("decode")) && !page.contains("role=\"prefill\""), "{page}");
    }

    #[test]
    fn a_metric_has_a_second_name_and_a_gauge_is_set_for_each_page() {
        let metrics = Metrics::new("router");
        metrics.counter_vec("tokens_total", "Tokens.", &["model"]).with_label_values(&["m"]).inc_by(2);
        metrics.alias(Alias {
            of: "tokens_total",
            name: "other:tokens_total",
            label: ("model", "model_name"),
        });
        let waiting = metrics.foreign_gauge_vec("other:waiting", "Waiting.", &["model_name"]);
        metrics.before_page(move || waiting.with_label_values(&["m"]).inc());
        metrics.page();
        let page = metrics.page();
        for line in ["baton_router_tokens_total{model=\"m\"} 2", "other:tokens_total{model_name=\"m\"} 2"] {
            assert!(page.contains(line), "{page}");
        }
        assert!(page.contains("other:waiting{model_name=\"m\"} 2"), "{page}");
    }

    #[test]
    fn a_process_shows_its_version_and_its_memory() {
        let page = Metrics::of_process("router").page();
        let version = env!("CARGO_PKG_VERSION");
        let line = format!("baton_build_info{{process=\"router\",version=\"{version}\"}} 1\n");
        assert!(page.contains(&line), "{page}");
        let resident = page.lines().find_map(|line| line.strip_prefix("process_resident_memory_bytes "));
        assert!(resident.is_some_and(|bytes| bytes.parse::<u64>().is_ok_and(|bytes| bytes > 0)), "{page}");
    }

    #[test]
    fn processes_do_not_share_a_registry() {
        for process in ["router", "node"] {
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
        for buckets in [LATENCY_BUCKETS, TOKEN_BUCKETS, BYTES_BUCKETS] {
            assert!(buckets.is_sorted_by(|a, b| a < b));
        }
    }
}

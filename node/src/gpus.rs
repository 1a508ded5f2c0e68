//! Figures of the node's GPUs: memory, power, clocks, temperature and utilization.
//!
//! They come from NVIDIA's management library (NVML), which is loaded at run time. Without a GPU there is no
//! series.

use std::ffi::OsStr;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chassis::metrics::Metrics;
use device::cuda::gpu_uuids;
use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use prometheus::{GaugeVec, IntGaugeVec};
use tokio::task::spawn_blocking;
use tracing::warn;

/// The library's name. Containers lack the name without the number, which belongs to a development package.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// The interval of readings.
const READ_EVERY: Duration = Duration::from_secs(2);

/// The gauges of the node's GPUs, by the numbers that the node uses.
#[derive(Clone, Debug)]
pub(crate) struct GpuMetrics {
    info: IntGaugeVec,
    memory: IntGaugeVec,
    power: GaugeVec,
    power_limit: GaugeVec,
    clock: GaugeVec,
    temperature: IntGaugeVec,
    utilization: GaugeVec,
}

/// The node's GPUs, opened in NVML.
#[derive(Debug)]
struct Gpus {
    nvml: Nvml,
    gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Gpu {
    /// The number that the node uses. NVML's differs where `CUDA_VISIBLE_DEVICES` is set.
    number: String,
    /// The id by which NVML finds the GPU.
    uuid: String,
}

/// One reading of a GPU. `None`: the GPU does not report the figure.
#[derive(Clone, Debug, Default, PartialEq)]
struct GpuFigures {
    memory_free_bytes: Option<u64>,
    memory_used_bytes: Option<u64>,
    power_watts: Option<f64>,
    power_limit_watts: Option<f64>,
    sm_clock_hertz: Option<f64>,
    memory_clock_hertz: Option<f64>,
    temperature_celsius: Option<i64>,
    compute_ratio: Option<f64>,
    memory_ratio: Option<f64>,
}

/// Reads the figures of these GPUs at intervals, until the future is dropped. Returns at once if there is none, or
/// no NVML.
pub(crate) async fn follow(numbers: Range<usize>, metrics: GpuMetrics) {
    let Ok(Some(gpus)) = spawn_blocking(move || Gpus::of_machine(numbers)).await else { return };
    gpus.names().for_each(|(gpu, name)| metrics.name(gpu, &name));
    let gpus = Arc::new(gpus);
    loop {
        let reader = Arc::clone(&gpus);
        // A call takes up to some milliseconds, and longer while the driver has lost a GPU.
        let Ok(read) = spawn_blocking(move || reader.read()).await else { return };
        gpus.gpus.iter().zip(&read).for_each(|(gpu, figures)| metrics.show(gpu, figures));
        tokio::time::sleep(READ_EVERY).await;
    }
}

// === impl Gpus ===

impl Gpus {
    /// Opens the GPUs. `None`: the machine has none, or no NVML.
    fn of_machine(numbers: Range<usize>) -> Option<Self> {
        if numbers.is_empty() {
            return None;
        }
        // A node with `device = "auto"` computes on the CPU then.
        let uuids = gpu_uuids(numbers.clone()).ok()?;
        let gpus = numbers.zip(uuids).map(|(number, uuid)| Gpu { number: number.to_string(), uuid });
        let opened = Self::open(Path::new(LIBRARY), gpus.collect());
        opened.inspect_err(|error| warn!(%error, library = LIBRARY, "GPU metrics are not available")).ok()
    }

    fn open(library: &Path, gpus: Vec<Gpu>) -> Result<Self, NvmlError> {
        let nvml = Nvml::builder().lib_path(OsStr::new(library)).init()?;
        Ok(Self { nvml, gpus })
    }

    /// Returns the GPUs with their products' names.
    fn names(&self) -> impl Iterator<Item = (&Gpu, String)> {
        let name = |gpu: &Gpu| self.nvml.device_by_uuid(gpu.uuid.as_str())?.name();
        self.gpus.iter().filter_map(move |gpu| Some((gpu, name(gpu).ok()?)))
    }

    fn read(&self) -> Vec<GpuFigures> {
        let found = self.gpus.iter().map(|gpu| self.nvml.device_by_uuid(gpu.uuid.as_str()));
        found.map(|gpu| gpu.map(|gpu| GpuFigures::read(&gpu)).unwrap_or_default()).collect()
    }
}

impl GpuFigures {
    fn read(gpu: &Device<'_>) -> Self {
        let memory = gpu.memory_info().ok();
        let milliwatts = |value: Result<u32, NvmlError>| value.ok().map(|value| f64::from(value) / 1e3);
        let megahertz = |clock| gpu.clock_info(clock).ok().map(|value| f64::from(value) * 1e6);
        let busy = gpu.utilization_rates().ok();
        let percent = |value: u32| f64::from(value) / 100.0;
        Self {
            memory_free_bytes: memory.as_ref().map(|memory| memory.free),
            memory_used_bytes: memory.as_ref().map(|memory| memory.used),
            power_watts: milliwatts(gpu.power_usage()),
            power_limit_watts: milliwatts(gpu.enforced_power_limit()),
            sm_clock_hertz: megahertz(Clock::SM),
            memory_clock_hertz: megahertz(Clock::Memory),
            temperature_celsius: gpu.temperature(TemperatureSensor::Gpu).ok().map(i64::from),
            compute_ratio: busy.as_ref().map(|busy| percent(busy.gpu)),
            memory_ratio: busy.as_ref().map(|busy| percent(busy.memory)),
        }
    }
}

// === impl GpuMetrics ===

impl GpuMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let float = |name, help, labels: &[&str]| metrics.float_gauge_vec(name, help, labels);
        Self {
            info: metrics.gauge_vec("gpu_info", "1, with the GPU's name.", &["gpu", "uuid", "name"]),
            memory: metrics.gauge_vec("gpu_memory_bytes", "Memory of the GPU.", &["gpu", "state"]),
            power: float("gpu_power_watts", "Power that the GPU draws.", &["gpu"]),
            power_limit: float("gpu_power_limit_watts", "Limit of the GPU's power.", &["gpu"]),
            clock: float("gpu_clock_hertz", "Clocks of the GPU.", &["gpu", "clock"]),
            temperature: metrics.gauge_vec("gpu_temperature_celsius", "Temperature of the GPU.", &["gpu"]),
            utilization: float(
                "gpu_utilization_ratio",
                "Share of time in which the GPU computes, or its memory is read or written.",
                &["gpu", "part"],
            ),
        }
    }

    fn name(&self, gpu: &Gpu, name: &str) {
        self.info.with_label_values(&[gpu.number.as_str(), &gpu.uuid, name]).set(1);
    }

    /// Sets the gauges of a GPU. A figure that is absent has no series.
    fn show(&self, gpu: &Gpu, figures: &GpuFigures) {
        let gpu = gpu.number.as_str();
        let bytes = |value: Option<u64>| value.and_then(|value| i64::try_from(value).ok());
        set_whole(&self.memory, &[gpu, "free"], bytes(figures.memory_free_bytes));
        set_whole(&self.memory, &[gpu, "used"], bytes(figures.memory_used_bytes));
        set(&self.power, &[gpu], figures.power_watts);
        set(&self.power_limit, &[gpu], figures.power_limit_watts);
        set(&self.clock, &[gpu, "sm"], figures.sm_clock_hertz);
        set(&self.clock, &[gpu, "memory"], figures.memory_clock_hertz);
        set_whole(&self.temperature, &[gpu], figures.temperature_celsius);
        set(&self.utilization, &[gpu, "compute"], figures.compute_ratio);
        set(&self.utilization, &[gpu, "memory"], figures.memory_ratio);
    }
}

fn set(gauge: &GaugeVec, labels: &[&str], value: Option<f64>) {
    match value {
        Some(value) => gauge.with_label_values(labels).set(value),
        // The series may not exist.
        None => drop(gauge.remove_label_values(labels)),
    }
}

fn set_whole(gauge: &IntGaugeVec, labels: &[&str], value: Option<i64>) {
    match value {
        Some(value) => gauge.with_label_values(labels).set(value),
        None => drop(gauge.remove_label_values(labels)),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A library with NVML's functions for one GPU, which reports no power limit and is lost after its first
    /// reading of the temperature.
    const FAKE: &str = r#"
        #include <string.h>
        typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_t;
        typedef struct { unsigned gpu, memory; } busy_t;
        int lost = 0;
        int nvmlInit_v2(void) { return 0; }
        int nvmlInitWithFlags(unsigned flags) { return 0; }
        int nvmlShutdown(void) { return 0; }
        int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "580.1", n); return 0; }
        int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
            *gpu = (void *)8;
            return strcmp(uuid, "GPU-0102") ? 6 : lost ? 15 : 0;
        }
        int nvmlDeviceGetName(void *gpu, char *text, unsigned n) { strncpy(text, "Fake GPU", n); return 0; }
        int nvmlDeviceGetMemoryInfo_v2(void *gpu, memory_t *memory) {
            memory->total = 100; memory->reserved = 10; memory->free = 60; memory->used = 30;
            return 0;
        }
        int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) { *milliwatts = 350500; return 0; }
        int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *milliwatts) { return 3; }
        int nvmlDeviceGetClockInfo(void *gpu, int clock, unsigned *megahertz) {
            *megahertz = clock == 1 ? 1980 : clock == 2 ? 2619 : 0;
            return 0;
        }
        int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned *celsius) { *celsius = 41; lost = 1; return 0; }
        int nvmlDeviceGetUtilizationRates(void *gpu, busy_t *busy) { busy->gpu = 97; busy->memory = 25; return 0; }
    "#;

    #[test]
    fn a_gpus_figures_are_shown_until_it_is_lost() {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, library) = (folder.path().join("nvml.c"), folder.path().join(LIBRARY));
        std::fs::write(&source, FAKE).expect("written");
        let mut cc = Command::new("cc");
        let compiled = cc.args(["-shared", "-fPIC", "-o"]).args([&library, &source]).status();
        assert!(compiled.expect("./test.sh installs a C compiler").success());
        let gpus = [("0", "GPU-0102"), ("1", "GPU-none")];
        let gpus = gpus.map(|(number, uuid)| Gpu { number: number.to_owned(), uuid: uuid.to_owned() });
        let gpus = Gpus::open(&library, gpus.to_vec()).expect("it is loaded");
        let page = Metrics::new("node");
        let metrics = GpuMetrics::new(&page);
        gpus.names().for_each(|(gpu, name)| metrics.name(gpu, &name));
        let read = gpus.read();
        let expected = GpuFigures {
            memory_free_bytes: Some(60),
            memory_used_bytes: Some(30),
            power_watts: Some(350.5),
            power_limit_watts: None,
            sm_clock_hertz: Some(1.98e9),
            memory_clock_hertz: Some(2.619e9),
            temperature_celsius: Some(41),
            compute_ratio: Some(0.97),
            memory_ratio: Some(0.25),
        };
        assert_eq!(read, [expected, GpuFigures::default()]);

        metrics.show(&gpus.gpus[0], &read[0]);
        let shown = page.page();
        for line in [
            "gpu_info{gpu=\"0\",name=\"Fake GPU\",uuid=\"GPU-0102\"} 1",
            "gpu_memory_bytes{gpu=\"0\",state=\"used\"} 30",
            "gpu_power_watts{gpu=\"0\"} 350.5",
            "gpu_clock_hertz{clock=\"sm\",gpu=\"0\"} 1980000000",
            "gpu_temperature_celsius{gpu=\"0\"} 41",
            "gpu_utilization_ratio{gpu=\"0\",part=\"compute\"} 0.97",
        ] {
            assert!(shown.contains(&format!("baton_node_{line}\n")), "{line} in {shown}");
        }
        assert!(!shown.contains("gpu_power_limit_watts{"), "{shown}");
        metrics.show(&gpus.gpus[0], &gpus.read()[0]);
        let lost = page.page();
        let series: Vec<&str> = lost.lines().filter(|line| line.contains("gpu=\"0\"")).collect();
        assert_eq!(series.len(), 1, "a lost GPU has a name and no figures: {series:?}");
    }

    #[tokio::test]
    async fn without_a_gpu_there_is_no_series() {
        let page = Metrics::new("node");
        follow(0..0, GpuMetrics::new(&page)).await;
        assert!(!page.page().contains("gpu=\""), "{}", page.page());
    }
}

//! The resources that the process uses, read from `/proc`: the metrics `process_*`, under the names that all
//! Prometheus clients use.

use std::fs::read_to_string;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge};

/// Linux reports times to programs in hundredths of a second on every architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// One reading. A value that `/proc` does not show is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Usage {
    cpu_seconds: f64,
    start_seconds: f64,
    threads: f64,
    virtual_bytes: f64,
    resident_bytes: f64,
    open_files: f64,
    open_files_max: f64,
}

impl Usage {
    fn now() -> Self {
        let text = |file: &str| read_to_string(file).unwrap_or_default();
        let own =
            Self::parse(&text("/proc/self/stat"), &text("/proc/self/status"), &text("/proc/self/limits"));
        let booted = number_after(&text("/proc/stat"), "btime ");
        let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as f64;
        Self { start_seconds: booted + own.start_seconds, open_files, ..own }
    }

    /// Reads the files. `start_seconds` is the time from the machine's start.
    fn parse(stat: &str, status: &str, limits: &str) -> Self {
        // The program's name, in parentheses, may contain spaces. The third field of the file follows it.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse().ok()).unwrap_or(0.0);
        Self {
            cpu_seconds: (field(14) + field(15)) / TICKS_PER_SECOND,
            start_seconds: field(22) / TICKS_PER_SECOND,
            threads: field(20),
            virtual_bytes: field(23),
            resident_bytes: number_after(status, "VmRSS:") * 1024.0,
            open_files: 0.0,
            open_files_max: number_after(limits, "Max open files"),
        }
    }

    fn collectors(self) -> Vec<Box<dyn Collector>> {
        let gauge = |name: &str, help: &str, value: f64| -> Box<dyn Collector> {
            let gauge = Gauge::new(name, help).expect("the name is well-formed");
            gauge.set(value);
            Box::new(gauge)
        };
        let cpu = Counter::new("process_cpu_seconds_total", "Processor time of the process.");
        let cpu = cpu.expect("the name is well-formed");
        cpu.inc_by(self.cpu_seconds);
        vec![
            Box::new(cpu),
            gauge("process_start_time_seconds", "The process's start in Unix time.", self.start_seconds),
            gauge("process_threads", "Threads of the process.", self.threads),
            gauge("process_virtual_memory_bytes", "Virtual memory of the process.", self.virtual_bytes),
            gauge("process_resident_memory_bytes", "Memory of the process in use.", self.resident_bytes),
            gauge("process_open_fds", "Open files and sockets.", self.open_files),
            gauge("process_max_fds", "The limit of open files and sockets.", self.open_files_max),
        ]
    }
}

/// Returns the number that follows `name` at the beginning of a line, or zero.
fn number_after(text: &str, name: &str) -> f64 {
    let rest = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    rest.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0.0)
}

/// The collector of the metrics. Each page has a new reading.
pub(crate) struct UsageOnPage {
    /// Describes the metrics, and stays at zero.
    empty: Vec<Box<dyn Collector>>,
}

impl UsageOnPage {
    pub(crate) fn new() -> Self {
        Self { empty: Usage::default().collectors() }
    }
}

impl Collector for UsageOnPage {
    fn desc(&self) -> Vec<&Desc> {
        self.empty.iter().flat_map(|one| one.desc()).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        Usage::now().collectors().iter().flat_map(|one| one.collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_proc_are_understood() {
        let stat =
            "7 (a) b) S 1 7 7 0 -1 4194560 97 0 0 0 250 50 0 0 20 0 5 0 1234 8192 3 18446744073709551615";
        let status = "Name:\ta\nVmRSS:\t     12 kB\nThreads:\t5\n";
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096  files\n";
        let usage = Usage::parse(stat, status, limits);
        let expected = Usage {
            cpu_seconds: 3.0,
            start_seconds: 12.34,
            threads: 5.0,
            virtual_bytes: 8192.0,
            resident_bytes: 12288.0,
            open_files: 0.0,
            open_files_max: 1024.0,
        };
        assert_eq!(usage, expected);
        assert_eq!(Usage::parse("", "", ""), Usage::default());
    }

    #[test]
    fn this_process_uses_something() {
        let usage = Usage::now();
        assert!(usage.resident_bytes > 0.0 && usage.virtual_bytes > usage.resident_bytes, "{usage:?}");
        assert!(usage.threads >= 1.0 && usage.open_files >= 1.0 && usage.open_files_max >= 1.0, "{usage:?}");
        assert!(usage.start_seconds > 1e9, "{usage:?}");
    }
}

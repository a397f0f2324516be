//! The standard `process_*` metrics of Prometheus client libraries, read from /proc at each scrape.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Clock ticks per second in /proc: USER_HZ, which is 100 on all supported architectures.
const TICKS_PER_SECOND: f64 = 100.0;

/// Collects the metrics of the process from /proc/self.
#[derive(Debug)]
pub(crate) struct Process;

/// Resource usage of a process. A value that cannot be read is `None`.
#[derive(Debug, Default, PartialEq)]
struct Usage {
    cpu_seconds: Option<f64>,
    start_seconds: Option<f64>,
    resident_bytes: Option<u64>,
    virtual_bytes: Option<u64>,
    open_files: Option<u64>,
    max_files: Option<u64>,
}

impl Usage {
    fn read() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let open = std::fs::read_dir("/proc/self/fd").ok().map(Iterator::count);
        let mut usage = Self::parse(
            &read("/proc/self/stat"),
            &read("/proc/self/status"),
            &read("/proc/self/limits"),
            &read("/proc/stat"),
        );
        // The descriptor that reads the directory is not counted.
        usage.open_files = open.and_then(|n| u64::try_from(n.saturating_sub(1)).ok());
        usage
    }

    /// Parses the contents of /proc/self/stat, /proc/self/status, /proc/self/limits and /proc/stat.
    fn parse(own: &str, status: &str, limits: &str, machine: &str) -> Self {
        // The name in parentheses may contain any character, so fields are counted from the last parenthesis:
        // the third is next.
        let fields: Vec<&str> = own.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |number: usize| fields.get(number.checked_sub(3)?)?.parse::<u64>().ok();
        #[expect(clippy::cast_precision_loss, reason = "2^53 ticks are three million years")]
        let seconds = |ticks: u64| ticks as f64 / TICKS_PER_SECOND;
        let boot = machine.lines().find_map(|l| l.strip_prefix("btime ")?.trim().parse::<f64>().ok());
        let memory = |name: &str| {
            let value = status.lines().find_map(|l| l.strip_prefix(name)?.split_whitespace().next());
            value.and_then(|n| n.parse::<u64>().ok()).map(|kibibytes| kibibytes << 10)
        };
        let most = limits.lines().find_map(|l| l.strip_prefix("Max open files")?.split_whitespace().next());
        Self {
            cpu_seconds: field(14).zip(field(15)).map(|(user, system)| seconds(user.saturating_add(system))),
            start_seconds: boot.zip(field(22)).map(|(boot, after)| boot + seconds(after)),
            virtual_bytes: memory("VmSize:"),
            resident_bytes: memory("VmRSS:"),
            max_files: most.and_then(|n| n.parse().ok()),
            open_files: None,
        }
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let usage = Usage::read();
        let mut encode = |name: &str, help: &str, value: Option<&dyn EncodeMetric>| match value {
            Some(value) => value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?),
            None => Ok(()),
        };
        // Prometheus values are 64-bit floats.
        #[expect(clippy::cast_precision_loss, reason = "bytes and files below 2^53")]
        let gauge = |value: Option<u64>| value.map(|n| ConstGauge::new(n as f64));
        let cpu = usage.cpu_seconds.map(ConstCounter::new);
        encode(
            "process_cpu_seconds",
            "Total user and system CPU time spent in seconds",
            cpu.as_ref().map(|v| v as _),
        )?;
        let start = usage.start_seconds.map(ConstGauge::new);
        encode(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds",
            start.as_ref().map(|v| v as _),
        )?;
        for (name, help, value) in [
            ("process_resident_memory_bytes", "Resident memory size in bytes", usage.resident_bytes),
            ("process_virtual_memory_bytes", "Virtual memory size in bytes", usage.virtual_bytes),
            ("process_open_fds", "Number of open file descriptors", usage.open_files),
            ("process_max_fds", "Maximum number of open file descriptors", usage.max_files),
        ] {
            let value = gauge(value);
            encode(name, help, value.as_ref().map(|v| v as _))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str =
        "7 (a ) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 123400 8192000 300 1 1 1";

    #[test]
    fn process_statistics_are_parsed_with_any_process_name() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096                 files\n";
        let status = "Name:\ta\nVmSize:\t    8000 kB\nVmRSS:\t    1200 kB\n";
        let found = Usage::parse(STAT, status, limits, "cpu 1 2\nbtime 1000\n");
        let want = Usage {
            cpu_seconds: Some(3.0),
            start_seconds: Some(2234.0),
            resident_bytes: Some(1200 << 10),
            virtual_bytes: Some(8000 << 10),
            open_files: None,
            max_files: Some(1024),
        };
        assert_eq!(found, want);
        assert_eq!(Usage::parse("", "", "", ""), Usage::default(), "missing values stay unset");
    }

    #[test]
    fn process_metrics_reflect_the_activity_of_the_process() {
        let metric = |text: &str, name: &str| -> f64 {
            let line = text.lines().find(|l| l.starts_with(&format!("{name} ")));
            line.and_then(|l| l.split_once(' ')?.1.parse().ok()).unwrap_or_else(|| panic!("{name}\n{text}"))
        };
        crate::metrics::register_process_metrics();
        let before = crate::metrics::text();
        let files: Vec<_> = (0..50).map(|_| std::fs::File::open("/proc/self/stat").unwrap()).collect();
        let memory = vec![1_u8; 64 << 20];
        let mut turns = 0_u64;
        let after = loop {
            turns = std::hint::black_box((0..1_000_000_u64).fold(turns, u64::wrapping_add));
            let text = crate::metrics::text();
            if metric(&text, "process_cpu_seconds_total") > metric(&before, "process_cpu_seconds_total") {
                break text;
            }
        };
        assert!(metric(&after, "process_open_fds") >= metric(&before, "process_open_fds") + 40.0, "{after}");
        assert!(metric(&after, "process_open_fds") < metric(&after, "process_max_fds"));
        let grown = metric(&after, "process_resident_memory_bytes")
            - metric(&before, "process_resident_memory_bytes");
        assert!(grown >= f64::from(32 << 20), "{grown}");
        assert_eq!(
            metric(&after, "process_start_time_seconds"),
            metric(&before, "process_start_time_seconds")
        );
        assert!(metric(&after, "process_start_time_seconds") > 1e9);
        drop((files, memory));
    }
}

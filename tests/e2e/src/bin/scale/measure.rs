//! Resource usage of a process, its metrics, and quantiles.

use anyhow::Context as _;
use serde_json::{Value, json};

/// Resource usage of a process since its start.
#[derive(Debug, Clone)]
pub(crate) struct Usage {
    /// User and system time.
    pub(crate) cpu_seconds: f64,
    pub(crate) pss_kib: u64,
}

pub(crate) fn usage(pid: i32) -> anyhow::Result<Usage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // USER_HZ is 100 on every architecture this runs on.
    let ticks = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let pss =
        rollup.lines().find_map(|l| l.strip_prefix("Pss:")?.split_whitespace().next()?.parse::<u64>().ok());
    Ok(Usage { cpu_seconds: ticks as f64 / 100.0, pss_kib: pss.context("smaps_rollup has Pss")? })
}

pub(crate) mod metric {
    use std::path::Path;

    use quintlet_kit::messages::whole;
    use quintlet_kit::socket::channel;
    use quintlet_proto::debug::v1::MetricsRequest;
    use quintlet_proto::debug::v1::debug_client::DebugClient;

    pub(crate) async fn text(socket: &Path) -> anyhow::Result<String> {
        let mut client = DebugClient::new(channel(socket.to_owned()));
        Ok(whole(client.metrics(MetricsRequest {})).await?.into_inner().text)
    }

    /// Returns the value of a metric without labels; 0 if it does not exist.
    pub(crate) fn of(text: &str, name: &str) -> f64 {
        let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok();
        text.lines().find_map(value).unwrap_or_default()
    }
}

/// Returns statistics of delays in nanoseconds, in milliseconds.
pub(crate) fn delays(ns: &[u64]) -> Value {
    let mut sorted = ns.to_vec();
    sorted.sort_unstable();
    let at = |q: f64| {
        let last = sorted.len().saturating_sub(1);
        sorted.get((last as f64 * q).round() as usize).map_or(0.0, |ns| *ns as f64 / 1e6)
    };
    json!({"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "most": at(1.0), "frames": sorted.len()})
}

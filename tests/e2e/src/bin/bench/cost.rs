//! What a pod's life and an idle node cost in each service, from `/proc`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use quintlet_e2e::Node;
use quintlet_e2e::bins::SERVICES;
use serde_json::{Value, json};

/// Counters of all services since their start, and the requests that the API server received.
pub(crate) struct Cost(BTreeMap<String, u64>);

impl Cost {
    pub(crate) fn of(node: &Node) -> anyhow::Result<Self> {
        let mut counters = BTreeMap::new();
        for service in SERVICES {
            let pid = pid(node, service)?;
            counters.insert(format!("cpu_ms {service}"), cpu_ms(pid)?);
            let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
            counters.insert(format!("write_calls {service}"), field(&io, "syscw:"));
            counters.insert(format!("written_bytes {service}"), field(&io, "write_bytes:"));
        }
        for (request, count) in node.api().counts().iter() {
            counters.insert(format!("api {request}"), count);
        }
        Ok(Self(counters))
    }

    /// Returns the difference to an earlier reading.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let earlier = |key: &String| before.0.get(key).copied().unwrap_or_default();
        Self(self.0.iter().map(|(key, now)| (key.clone(), now.saturating_sub(earlier(key)))).collect())
    }

    /// Divides each counter by the number of pods, and adds the sum of all services.
    pub(crate) fn per_pod(&self, pods: usize) -> BTreeMap<String, f64> {
        let mut totals = self.0.clone();
        for (key, count) in &self.0 {
            if let Some((figure, service)) = key.split_once(' ')
                && SERVICES.contains(&service)
            {
                *totals.entry(format!("{figure} all")).or_default() += count;
            }
        }
        totals.into_iter().map(|(key, count)| (key, count as f64 / pods as f64)).collect()
    }
}

/// Returns CPU (per cent of a core), wake-ups per second and PSS (KiB) of each idle service.
pub(crate) async fn idle(node: &Node, span: Duration) -> anyhow::Result<Value> {
    let counters = || -> anyhow::Result<Vec<(u64, u64)>> {
        let pids = SERVICES.iter().map(|s| pid(node, s));
        pids.map(|pid| pid.and_then(|pid| Ok((cpu_ms(pid)?, wake_ups(pid)?)))).collect()
    };
    let before = counters()?;
    tokio::time::sleep(span).await;
    let mut services = BTreeMap::new();
    let (mut all_cpu, mut all_wake_ups, mut all_pss) = (0.0, 0.0, 0);
    for ((service, before), now) in SERVICES.iter().zip(before).zip(counters()?) {
        let cpu = (now.0 - before.0) as f64 / 10.0 / span.as_secs_f64();
        let wake_ups = now.1.saturating_sub(before.1) as f64 / span.as_secs_f64();
        let pss =
            field(&std::fs::read_to_string(format!("/proc/{}/smaps_rollup", pid(node, service)?))?, "Pss:");
        all_cpu += cpu;
        all_wake_ups += wake_ups;
        all_pss += pss;
        services.insert(
            (*service).to_owned(),
            json!({"cpu_percent": cpu, "wake_ups_per_second": wake_ups, "pss_kib": pss}),
        );
    }
    let all = json!({"cpu_percent": all_cpu, "wake_ups_per_second": all_wake_ups, "pss_kib": all_pss});
    services.insert("all".to_owned(), all);
    Ok(json!(services))
}

pub(crate) fn pid(node: &Node, service: &str) -> anyhow::Result<i32> {
    node.service(service).process().pid.with_context(|| format!("{service} runs"))
}

/// Returns the CPU time of a process in milliseconds.
fn cpu_ms(pid: i32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // utime and stime in ticks of 10 ms: USER_HZ is 100 on every architecture this runs on.
    Ok((fields[11].parse::<u64>()? + fields[12].parse::<u64>()?) * 10)
}

/// Returns how often threads of a process that still exist have waited.
fn wake_ups(pid: i32) -> anyhow::Result<u64> {
    let mut total = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that ends meanwhile has no status.
        let status = std::fs::read_to_string(thread?.path().join("status")).unwrap_or_default();
        total += field(&status, "voluntary_ctxt_switches:");
    }
    Ok(total)
}

/// Returns the first number after `name`; zero if it is absent.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

//! What a pod's life and an idle node cost in each process of an agent, from `/proc`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context as _;
use quintlet_testapi::TestApi;
use serde_json::{Value, json};

use crate::Node;
use crate::bins::SERVICES;

/// Milliseconds of a tick: USER_HZ is 100 on every architecture this runs on.
const TICK_MS: u64 = 10;

/// The processes of a node agent, and its API server.
pub struct Agent<'a> {
    /// Process IDs by the name of the process.
    pub processes: Vec<(&'static str, i32)>,
    /// The API server, whose requests are counted.
    pub api: &'a TestApi,
    /// The node of the services, whose calls of the runtime are counted.
    pub node: Option<&'a Node>,
}

impl std::fmt::Debug for Agent<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("processes", &self.processes).finish_non_exhaustive()
    }
}

impl<'a> Agent<'a> {
    /// Returns the services of a node.
    ///
    /// # Errors
    /// Fails if a service does not run.
    pub fn of(node: &'a Node) -> anyhow::Result<Self> {
        let processes = SERVICES.iter().map(|service| Ok((*service, pid(node, service)?)));
        Ok(Self { processes: processes.collect::<anyhow::Result<_>>()?, api: node.api(), node: Some(node) })
    }
}

/// Counters of all processes since their start, and the requests that the API server received.
#[derive(Debug)]
pub struct Cost(BTreeMap<String, u64>);

impl Cost {
    /// Reads the counters of an agent and of the machine.
    ///
    /// # Errors
    /// Fails if a process has ended.
    pub async fn of(agent: &Agent<'_>) -> anyhow::Result<Self> {
        let mut counters = BTreeMap::new();
        for (name, pid) in &agent.processes {
            let io = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
            let figures = [
                ("cpu_ms", cpu_ms(*pid)?),
                ("write_calls", field(&io, "syscw:")),
                ("written_bytes", field(&io, "write_bytes:")),
                ("wake_ups", wake_ups(*pid)?.values().sum()),
            ];
            for (figure, count) in figures {
                counters.insert(format!("{figure} {name}"), count);
                *counters.entry(format!("{figure} all")).or_default() += count;
            }
        }
        for (request, count) in agent.api.counts().iter() {
            counters.insert(format!("api {request}"), count);
        }
        if let Some(node) = agent.node {
            for (method, count) in by_label(
                &node.metrics("cri-proxy").await,
                "kubelet_runtime_operations_total",
                "operation_type",
            ) {
                counters.insert(format!("cri {method}"), count);
            }
            for (cause, count) in
                by_label(&node.metrics("pleg-service").await, "quintlet_pleg_inspections_total", "cause")
            {
                *counters.entry(format!("inspections {cause}")).or_default() += count;
            }
        }
        counters.extend(Self::of_machine()?.0);
        Ok(Self(counters))
    }

    /// CPU of the whole machine, which includes the runtime and its short-lived programs, and that of this
    /// process, which is the API server and the client.
    ///
    /// # Errors
    /// Fails if `/proc` cannot be read.
    pub fn of_machine() -> anyhow::Result<Self> {
        let stat = std::fs::read_to_string("/proc/stat")?;
        let ticks: Vec<u64> =
            stat.lines().next().unwrap_or_default().split_whitespace().skip(1).flat_map(str::parse).collect();
        // Without idle (3), waiting for disks (4) and what other guests of the hypervisor took (7 on).
        let busy: u64 = [0, 1, 2, 5, 6].iter().map(|i| ticks[*i]).sum();
        let own = cpu_ms(std::process::id().cast_signed())?;
        Ok(Self(BTreeMap::from([
            ("cpu_ms whole machine".to_owned(), busy * TICK_MS),
            ("cpu_ms API server and client".to_owned(), own),
        ])))
    }

    /// Returns the difference to an earlier reading.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |key: &String| before.0.get(key).copied().unwrap_or_default();
        Self(self.0.iter().map(|(key, now)| (key.clone(), now.saturating_sub(earlier(key)))).collect())
    }

    /// Divides each counter by the number of pods.
    #[must_use]
    pub fn per_pod(&self, pods: usize) -> BTreeMap<String, f64> {
        self.0.iter().map(|(key, count)| (key.clone(), *count as f64 / pods as f64)).collect()
    }
}

/// Returns CPU (per cent of a core), wake-ups per second and PSS (KiB) of each idle process.
///
/// # Errors
/// Fails if a process has ended.
pub async fn idle(agent: &Agent<'_>, span: Duration) -> anyhow::Result<Value> {
    let counters = || -> anyhow::Result<Vec<(u64, BTreeMap<OsString, u64>)>> {
        agent.processes.iter().map(|(_, pid)| Ok((cpu_ms(*pid)?, wake_ups(*pid)?))).collect()
    };
    let before = counters()?;
    tokio::time::sleep(span).await;
    let mut processes = BTreeMap::new();
    let mut all_cpu = 0.0;
    let mut all_wake_ups = 0.0;
    let mut all_pss = 0;
    for (((name, pid), before), now) in agent.processes.iter().zip(before).zip(counters()?) {
        let cpu = (now.0 - before.0) as f64 / 10.0 / span.as_secs_f64();
        // A thread that has ended is not counted, one that has started is.
        let earlier = |thread| before.1.get(thread).copied().unwrap_or_default();
        let wake_ups: u64 = now.1.iter().map(|(thread, count)| count.saturating_sub(earlier(thread))).sum();
        let wake_ups = wake_ups as f64 / span.as_secs_f64();
        let pss = field(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?, "Pss:");
        all_cpu += cpu;
        all_wake_ups += wake_ups;
        all_pss += pss;
        processes.insert(
            (*name).to_owned(),
            json!({"cpu_percent": cpu, "wake_ups_per_second": wake_ups, "pss_kib": pss}),
        );
    }
    let all = json!({"cpu_percent": all_cpu, "wake_ups_per_second": all_wake_ups, "pss_kib": all_pss});
    processes.insert("all".to_owned(), all);
    Ok(json!(processes))
}

/// Returns the values of a counter with the value of one of its labels.
fn by_label<'a>(metrics: &'a str, counter: &str, label: &str) -> Vec<(&'a str, u64)> {
    let labelled = |line: &'a str| {
        let (labels, count) = line.strip_prefix(counter)?.strip_prefix('{')?.split_once("} ")?;
        let value = labels.split(',').find_map(|one| one.strip_prefix(label)?.strip_prefix("=\""))?;
        Some((value.trim_end_matches('"'), count.trim().parse().ok()?))
    };
    metrics.lines().filter_map(labelled).collect()
}

/// Returns the process ID of a service.
///
/// # Errors
/// Fails if the service does not run.
pub fn pid(node: &Node, service: &str) -> anyhow::Result<i32> {
    node.service(service).process().pid.with_context(|| format!("{service} runs"))
}

/// Returns the CPU time of a process in milliseconds.
fn cpu_ms(pid: i32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // utime and stime.
    Ok((fields[11].parse::<u64>()? + fields[12].parse::<u64>()?) * TICK_MS)
}

/// Returns how often each thread of a process has waited.
fn wake_ups(pid: i32) -> anyhow::Result<BTreeMap<OsString, u64>> {
    let mut threads = BTreeMap::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?;
        // A thread that ends meanwhile has no status.
        let status = std::fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        threads.insert(thread.file_name(), field(&status, "voluntary_ctxt_switches:"));
    }
    Ok(threads)
}

/// Returns the first number after `name`; zero if it is absent.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

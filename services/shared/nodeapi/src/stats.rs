//! Statistics: `/stats/summary`, `/metrics/resource`, `/metrics/cadvisor`.
//!
//! Pods and containers as the runtime's CRI statistics have them; the node from `/proc`, which anybody may read. Volumes
//! belong to root and are not looked into from here.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use http::StatusCode;
use jiff::Timestamp;
use k8s_cri::v1;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use serde_json::{Map, Value, json};

use crate::answer::{Answer, error, json as json_answer, with_type};
use crate::host;
use crate::measured;
use crate::metrics::CONTENT_TYPE;
use crate::node::Node;
use crate::pods_group;
use crate::select;

/// Ticks of /proc/stat in a second: USER_HZ, the same on every Linux this runs on.
const NANOS_PER_TICK: u64 = 10_000_000;

/// What statistics need.
#[derive(Debug)]
pub struct Stats {
    /// The node's name.
    pub node_name: String,
    /// Where what is measured lies.
    pub places: Places,
    /// Time.
    pub clock: Clock,
    /// The node's CPU time at the last look.
    last: Rate,
    /// The same of all pods together.
    last_of_pods: Rate,
}

/// Where what is measured lies.
#[derive(Debug, Clone)]
pub struct Places {
    /// The root directory.
    pub root_dir: PathBuf,
    /// Where containers' logs are.
    pub pod_logs_dir: PathBuf,
    /// Cgroup under which `kubepods` stands.
    pub cgroup_root: String,
}

/// CPU time at the last look.
#[derive(Debug, Default)]
struct Rate(Mutex<Option<(Timestamp, u64)>>);

impl Rate {
    /// Cores in use since the last look, in nanocores; none at the first one.
    fn nano_cores(&self, time: Timestamp, cpu_nanos: u64) -> Option<u64> {
        let mut last = self.0.lock();
        let before = last.filter(|(at, _)| *at < time);
        // Too short a time would make the figure jump.
        let is_due = before.is_none_or(|(at, _)| time.duration_since(at).as_secs_f64() >= 1.0);
        if is_due {
            *last = Some((time, cpu_nanos));
        }
        before.and_then(|(at, nanos)| {
            let seconds = time.duration_since(at).as_secs_f64();
            let used = cpu_nanos.saturating_sub(nanos);
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            (seconds > 0.0).then(|| (used as f64 / seconds) as u64)
        })
    }
}

/// A pod with its containers, as seen at once.
struct Pod {
    name: String,
    namespace: String,
    uid: String,
    object: Value,
    stats: v1::LinuxPodSandboxStats,
}

/// The machine.
struct Machine {
    time: Timestamp,
    cpu_nanos: u64,
    nano_cores: Option<u64>,
    memory: BTreeMap<String, u64>,
    page_faults: u64,
    major_page_faults: u64,
}

impl Machine {
    fn of(&self, name: &str) -> u64 {
        self.memory.get(name).copied().unwrap_or(0)
    }

    fn working_set(&self) -> u64 {
        let used = self.of("MemTotal").saturating_sub(self.of("MemFree"));
        used.saturating_sub(self.of("Inactive(file)"))
    }
}

impl Stats {
    /// Statistics of a node.
    #[must_use]
    pub fn new(node_name: String, places: Places, clock: Clock) -> Self {
        Self { node_name, places, clock, last: Rate::default(), last_of_pods: Rate::default() }
    }

    /// All pods together, as one of the summary's system containers; null before there is a group of theirs.
    fn pods_group(&self, time: Timestamp) -> Value {
        let Some(u) = pods_group::read(Path::new("/sys/fs/cgroup"), &self.places.cgroup_root) else {
            return Value::Null;
        };
        let at = time.to_string();
        json!({
            "name": "pods",
            "cpu": object([("time", json!(at)), ("usageNanoCores", json!(self.last_of_pods.nano_cores(time, u.cpu_nanos))),
                ("usageCoreNanoSeconds", json!(u.cpu_nanos))]),
            "memory": object([
                ("time", json!(at)),
                ("availableBytes", json!(u.limit.map(|limit| limit.saturating_sub(u.working_set)))),
                ("usageBytes", json!(u.usage)),
                ("workingSetBytes", json!(u.working_set)),
                ("rssBytes", json!(u.rss)),
                ("pageFaults", json!(u.page_faults)),
                ("majorPageFaults", json!(u.major_page_faults)),
            ]),
        })
    }

    fn machine(&self) -> Machine {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let time = self.clock.wall();
        let cpu_nanos = busy_ticks(&read("/proc/stat")).saturating_mul(NANOS_PER_TICK);
        let vmstat = numbers(&read("/proc/vmstat"), 1);
        let nano_cores = self.last.nano_cores(time, cpu_nanos);
        Machine {
            time,
            cpu_nanos,
            nano_cores,
            memory: numbers(&read("/proc/meminfo"), 1024),
            page_faults: vmstat.get("pgfault").copied().unwrap_or(0),
            major_page_faults: vmstat.get("pgmajfault").copied().unwrap_or(0),
        }
    }

    async fn pods(&self, node: &Node) -> Result<Vec<Pod>, tonic::Status> {
        let (stats, views) = tokio::join!(measured::all(node), node.pods());
        let objects: BTreeMap<String, Value> =
            views?.into_iter().map(|v| (v.uid, serde_json::from_slice(&v.pod).unwrap_or_default())).collect();
        let pods = stats?.into_iter().map(|(metadata, stats)| Pod {
            object: objects.get(&metadata.uid).cloned().unwrap_or_default(),
            name: metadata.name,
            namespace: metadata.namespace,
            uid: metadata.uid,
            stats,
        });
        let mut pods: Vec<Pod> = pods.collect();
        pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        Ok(pods)
    }

    /// `/stats/summary`.
    pub async fn summary(&self, node: &Node, only_cpu_and_memory: bool) -> Answer {
        match self.pods(node).await {
            Ok(pods) => {
                let pods: Vec<Value> = pods.iter().map(|p| self.pod(p, only_cpu_and_memory)).collect();
                let node = self.node(node, only_cpu_and_memory).await;
                json_answer(json!({"node": node, "pods": pods}).to_string())
            }
            Err(status) => {
                error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {}", status.message()))
            }
        }
    }

    async fn node(&self, node: &Node, light: bool) -> Value {
        let m = self.machine();
        let time = m.time.to_string();
        let boot = jiff::SignedDuration::try_from(self.clock.boot()).unwrap_or_default();
        let working_set = m.working_set();
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let pods = self.pods_group(m.time);
        let psi = |of: &str| host::pressure(&read(&format!("/proc/pressure/{of}")));
        let mut out = json!({
            "nodeName": self.node_name,
            "startTime": m.time.checked_sub(boot).unwrap_or(m.time).to_string(),
            "cpu": object([("time", json!(time)), ("usageNanoCores", json!(m.nano_cores)),
                ("usageCoreNanoSeconds", json!(m.cpu_nanos))]),
            "memory": {
                "time": time,
                "availableBytes": m.of("MemTotal").saturating_sub(working_set),
                "usageBytes": m.of("MemTotal").saturating_sub(m.of("MemFree")),
                "workingSetBytes": working_set,
                "rssBytes": m.of("AnonPages"),
                "pageFaults": m.page_faults,
                "majorPageFaults": m.major_page_faults,
            },
            "systemContainers": if pods.is_null() { json!([]) } else { json!([pods]) },
            "swap": {
                "time": time,
                "swapAvailableBytes": m.of("SwapFree"),
                "swapUsageBytes": m.of("SwapTotal").saturating_sub(m.of("SwapFree")),
            },
        });
        for (field, psi) in [("cpu", psi("cpu")), ("memory", psi("memory"))] {
            if !psi.is_null() {
                out[field]["psi"] = psi;
            }
        }
        if light {
            return out;
        }
        let network = host::network(&read("/proc/net/dev"), &read("/proc/net/route"), &time);
        for (field, value) in
            [("network", network), ("io", object([("time", json!(time)), ("psi", psi("io"))]))]
        {
            if !value.is_null() {
                out[field] = value;
            }
        }
        out["fs"] = file_system(&self.places.root_dir, &time);
        out["rlimit"] = rlimit(&time);
        let mut images = k8s_cri::v1::image_service_client::ImageServiceClient::new(node.cri());
        if let Ok(info) = images.image_fs_info(v1::ImageFsInfoRequest {}).await
            && let Some(fs) = info.into_inner().image_filesystems.into_iter().next()
        {
            let place = fs.fs_id.map(|i| i.mountpoint).unwrap_or_default();
            let mut image = file_system(Path::new(&place), &time);
            image["usedBytes"] = json!(fs.used_bytes.map_or(0, |b| b.value));
            out["runtime"] = json!({"imageFs": image, "containerFs": image});
        }
        out
    }

    fn pod(&self, pod: &Pod, light: bool) -> Value {
        let containers: Vec<Value> = newest(&pod.stats.containers)
            .into_iter()
            .map(|(name, c)| {
                let started = select::status(&pod.object, name)
                    .and_then(|s| s["state"]["running"]["startedAt"].as_str())
                    .map(str::to_owned);
                let mut out = vec![
                    ("name", json!(name)),
                    ("startTime", json!(started)),
                    ("cpu", cpu(c.cpu.as_ref())),
                    ("memory", memory(c.memory.as_ref())),
                    ("swap", swap(c.swap.as_ref())),
                ];
                if !light {
                    out.push(("rootfs", writable(c.writable_layer.as_ref())));
                    out.push(("logs", self.logs(pod, name)));
                }
                object(out)
            })
            .collect();
        let mut out = vec![
            ("podRef", json!({"name": pod.name, "namespace": pod.namespace, "uid": pod.uid})),
            ("startTime", pod.object["status"]["startTime"].clone()),
            ("containers", json!(containers)),
            ("cpu", cpu(pod.stats.cpu.as_ref())),
            ("memory", memory(pod.stats.memory.as_ref())),
            ("swap", pod_swap(pod).map_or(Value::Null, |s| swap(Some(&s)))),
        ];
        if !light {
            out.push(("network", network(pod.stats.network.as_ref())));
            if let Some(count) = pod.stats.process.as_ref().and_then(|p| p.process_count.as_ref()) {
                out.push(("process_stats", json!({"process_count": count.value})));
            }
        }
        object(out)
    }

    fn logs(&self, pod: &Pod, container: &str) -> Value {
        let dir = self
            .places
            .pod_logs_dir
            .join(format!("{}_{}_{}", pod.namespace, pod.name, pod.uid))
            .join(container);
        let Ok(entries) = std::fs::read_dir(dir) else { return Value::Null };
        let sizes: Vec<u64> = entries.flatten().filter_map(|e| Some(e.metadata().ok()?.len())).collect();
        let mut out = file_system(&self.places.pod_logs_dir, &self.clock.wall().to_string());
        out["usedBytes"] = json!(sizes.iter().sum::<u64>());
        out["inodesUsed"] = json!(sizes.len() + 1);
        out
    }

    /// `/metrics/resource`.
    pub async fn resource(&self, node: &Node) -> Answer {
        let pods = self.pods(node).await;
        let mut out = Text::default();
        if let Ok(pods) = &pods {
            let m = self.machine();
            let ms = Some(m.time.as_millisecond());
            out.sample("node_cpu_usage_seconds_total", "counter", "", seconds(m.cpu_nanos), ms);
            out.sample("node_memory_working_set_bytes", "gauge", "", whole(m.working_set()), ms);
            let swap = m.of("SwapTotal").saturating_sub(m.of("SwapFree"));
            out.sample("node_swap_usage_bytes", "gauge", "", whole(swap), ms);
            for pod in pods {
                let labels = labels([("namespace", &pod.namespace), ("pod", &pod.name)]);
                out.usage("pod", &labels, pod.stats.cpu.as_ref(), pod.stats.memory.as_ref());
                if let Some(swap) = pod_swap(pod) {
                    let at = Some(swap.timestamp / 1_000_000);
                    let used = swap.swap_usage_bytes.map_or(0, |b| b.value);
                    out.sample("pod_swap_usage_bytes", "gauge", &labels, whole(used), at);
                }
                for (name, c) in newest(&pod.stats.containers) {
                    let labels = self::labels([
                        ("container", name),
                        ("namespace", &pod.namespace),
                        ("pod", &pod.name),
                    ]);
                    out.usage("container", &labels, c.cpu.as_ref(), c.memory.as_ref());
                    if let Some(started) = started(&pod.object, name) {
                        out.sample("container_start_time_seconds", "gauge", &labels, started, None);
                    }
                    out.swap(&labels, c.swap.as_ref());
                }
            }
        }
        out.sample("resource_scrape_error", "gauge", "", if pods.is_err() { 1.0 } else { 0.0 }, None);
        with_type(StatusCode::OK, CONTENT_TYPE, out.finish())
    }

    /// `/metrics/cadvisor`: CPU, memory, network and file system of containers, and what the machine has.
    pub async fn cadvisor(&self, node: &Node) -> Answer {
        let pods = match self.pods(node).await {
            Ok(pods) => pods,
            Err(status) => return error(StatusCode::INTERNAL_SERVER_ERROR, status.message()),
        };
        let mut out = Text::default();
        let m = self.machine();
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        out.sample("machine_cpu_cores", "gauge", "", whole(cpus as u64), None);
        out.sample("machine_memory_bytes", "gauge", "", whole(m.of("MemTotal")), None);
        for pod in &pods {
            let row = |container: &str, id: &str, image: &str| {
                labels([
                    ("container", container),
                    ("id", id),
                    ("image", image),
                    ("name", id.trim_start_matches('/')),
                    ("namespace", &pod.namespace),
                    ("pod", &pod.name),
                ])
            };
            let of_pod = row("", "", "");
            out.container(&of_pod, pod.stats.cpu.as_ref(), pod.stats.memory.as_ref());
            for i in pod.stats.network.iter().flat_map(|n| n.default_interface.iter().chain(&n.interfaces)) {
                let of_interface = format!("{of_pod},interface=\"{}\"", escape(&i.name));
                for (name, value) in [
                    ("container_network_receive_bytes_total", i.rx_bytes),
                    ("container_network_receive_errors_total", i.rx_errors),
                    ("container_network_transmit_bytes_total", i.tx_bytes),
                    ("container_network_transmit_errors_total", i.tx_errors),
                ] {
                    if let Some(value) = value {
                        out.sample(name, "counter", &of_interface, whole(value.value), None);
                    }
                }
            }
            for (name, c) in newest(&pod.stats.containers) {
                let id = c.attributes.as_ref().map(|a| format!("/{}", a.id)).unwrap_or_default();
                let image = select::status(&pod.object, name).and_then(|s| s["image"].as_str());
                let labels = row(name, &id, image.unwrap_or_default());
                out.container(&labels, c.cpu.as_ref(), c.memory.as_ref());
                if let Some(used) = c.writable_layer.as_ref().and_then(|w| w.used_bytes) {
                    out.sample("container_fs_usage_bytes", "gauge", &labels, whole(used.value), None);
                }
                if let Some(started) = started(&pod.object, name) {
                    out.sample("container_start_time_seconds", "gauge", &labels, started, None);
                }
            }
        }
        with_type(StatusCode::OK, CONTENT_TYPE, out.finish())
    }
}

/// The newest instance of each container.
fn newest(all: &[v1::ContainerStats]) -> BTreeMap<&str, &v1::ContainerStats> {
    let mut out: BTreeMap<&str, &v1::ContainerStats> = BTreeMap::new();
    let attempt =
        |c: &v1::ContainerStats| c.attributes.as_ref().and_then(|a| a.metadata.as_ref()).map(|m| m.attempt);
    for c in all {
        let Some(name) = c.attributes.as_ref().and_then(|a| a.metadata.as_ref()).map(|m| m.name.as_str())
        else {
            continue;
        };
        if out.get(name).is_none_or(|known| attempt(known) < attempt(c)) {
            out.insert(name, c);
        }
    }
    out
}

fn started(pod: &Value, container: &str) -> Option<f64> {
    let text = select::status(pod, container)?["state"]["running"]["startedAt"].as_str()?;
    let at = text.parse::<Timestamp>().ok()?.as_second();
    #[expect(clippy::cast_precision_loss, reason = "seconds since 1970 fit")]
    (at > 0).then_some(at as f64)
}

/// Metrics by family, as their samples come.
#[derive(Debug, Default)]
struct Text(BTreeMap<&'static str, (&'static str, String)>);

impl Text {
    fn sample(&mut self, name: &'static str, kind: &'static str, labels: &str, value: f64, ms: Option<i64>) {
        let (_, lines) = self.0.entry(name).or_insert_with(|| (kind, String::new()));
        let labels = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
        let at = ms.map(|ms| format!(" {ms}")).unwrap_or_default();
        // Writing to a String does not fail.
        let _ = writeln!(lines, "{name}{labels} {value}{at}");
    }

    fn usage(
        &mut self,
        of: &str,
        labels: &str,
        cpu: Option<&v1::CpuUsage>,
        memory: Option<&v1::MemoryUsage>,
    ) {
        let (cpu_name, memory_name) = if of == "pod" {
            ("pod_cpu_usage_seconds_total", "pod_memory_working_set_bytes")
        } else {
            ("container_cpu_usage_seconds_total", "container_memory_working_set_bytes")
        };
        if let Some((value, at)) = cpu.and_then(|c| Some((c.usage_core_nano_seconds?.value, c.timestamp))) {
            self.sample(cpu_name, "counter", labels, seconds(value), Some(at / 1_000_000));
        }
        if let Some((value, at)) = memory.and_then(|m| Some((m.working_set_bytes?.value, m.timestamp))) {
            self.sample(memory_name, "gauge", labels, whole(value), Some(at / 1_000_000));
        }
    }

    fn swap(&mut self, labels: &str, swap: Option<&v1::SwapUsage>) {
        let Some((used, swap)) = swap.and_then(|s| Some((s.swap_usage_bytes?.value, s))) else { return };
        let at = Some(swap.timestamp / 1_000_000);
        self.sample("container_swap_usage_bytes", "gauge", labels, whole(used), at);
        // A runtime that does not tell what is left knows no limit.
        if let Some(left) = swap.swap_available_bytes {
            let limit = used.saturating_add(left.value);
            self.sample("container_swap_limit_bytes", "gauge", labels, whole(limit), at);
        }
    }

    fn container(&mut self, labels: &str, cpu: Option<&v1::CpuUsage>, memory: Option<&v1::MemoryUsage>) {
        self.usage("container", labels, cpu, memory);
        let Some(memory) = memory else { return };
        for (name, value) in
            [("container_memory_usage_bytes", memory.usage_bytes), ("container_memory_rss", memory.rss_bytes)]
        {
            if let Some(value) = value {
                self.sample(name, "gauge", labels, whole(value.value), Some(memory.timestamp / 1_000_000));
            }
        }
    }

    fn finish(self) -> String {
        let family = |(name, (kind, lines)): (&str, (&str, String))| {
            let help = name.replace('_', " ");
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}")
        };
        self.0.into_iter().map(family).collect()
    }
}

fn labels<const N: usize>(pairs: [(&str, &str); N]) -> String {
    pairs.map(|(name, value)| format!("{name}=\"{}\"", escape(value))).join(",")
}

fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[expect(clippy::cast_precision_loss, reason = "metrics are floats")]
fn whole(value: u64) -> f64 {
    value as f64
}

fn seconds(nanos: u64) -> f64 {
    whole(nanos) / 1e9
}

/// An object without what is null.
fn object<'a>(pairs: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    let there = pairs.into_iter().filter(|(_, v)| !v.is_null());
    Value::Object(there.map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>())
}

fn time(nanos: i64) -> Value {
    json!(Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or_default().to_string())
}

fn number(value: Option<v1::UInt64Value>) -> Value {
    json!(value.map(|v| v.value))
}

fn cpu(cpu: Option<&v1::CpuUsage>) -> Value {
    cpu.map_or(Value::Null, |c| {
        object([
            ("time", time(c.timestamp)),
            ("usageNanoCores", number(c.usage_nano_cores)),
            ("usageCoreNanoSeconds", number(c.usage_core_nano_seconds)),
        ])
    })
}

fn memory(memory: Option<&v1::MemoryUsage>) -> Value {
    memory.map_or(Value::Null, |m| {
        object([
            ("time", time(m.timestamp)),
            ("availableBytes", number(m.available_bytes)),
            ("usageBytes", number(m.usage_bytes)),
            ("workingSetBytes", number(m.working_set_bytes)),
            ("rssBytes", number(m.rss_bytes)),
            ("pageFaults", number(m.page_faults)),
            ("majorPageFaults", number(m.major_page_faults)),
        ])
    })
}

fn swap(swap: Option<&v1::SwapUsage>) -> Value {
    swap.map_or(Value::Null, |s| {
        object([
            ("time", time(s.timestamp)),
            ("swapAvailableBytes", number(s.swap_available_bytes)),
            ("swapUsageBytes", number(s.swap_usage_bytes)),
        ])
    })
}

/// Swap of a pod's containers together, as old as the oldest figure; none where the runtime does not tell of each.
fn pod_swap(pod: &Pod) -> Option<v1::SwapUsage> {
    let all: Vec<&v1::SwapUsage> =
        newest(&pod.stats.containers).into_values().map(|c| c.swap.as_ref()).collect::<Option<_>>()?;
    let used = all.iter().map(|s| Some(s.swap_usage_bytes?.value)).sum::<Option<u64>>()?;
    Some(v1::SwapUsage {
        timestamp: all.iter().map(|s| s.timestamp).min()?,
        swap_usage_bytes: Some(v1::UInt64Value { value: used }),
        ..v1::SwapUsage::default()
    })
}

fn writable(layer: Option<&v1::FilesystemUsage>) -> Value {
    layer.map_or(Value::Null, |f| {
        object([
            ("time", time(f.timestamp)),
            ("usedBytes", number(f.used_bytes)),
            ("inodesUsed", number(f.inodes_used)),
        ])
    })
}

fn interface(i: &v1::NetworkInterfaceUsage) -> Vec<(&'static str, Value)> {
    vec![
        ("name", json!(i.name)),
        ("rxBytes", number(i.rx_bytes)),
        ("rxErrors", number(i.rx_errors)),
        ("txBytes", number(i.tx_bytes)),
        ("txErrors", number(i.tx_errors)),
    ]
}

fn network(network: Option<&v1::NetworkUsage>) -> Value {
    network.map_or(Value::Null, |n| {
        let all = n.default_interface.iter().chain(&n.interfaces);
        let interfaces: Vec<Value> = all.map(|i| object(interface(i))).collect();
        let mut out = vec![("time", time(n.timestamp)), ("interfaces", json!(interfaces))];
        out.extend(n.default_interface.iter().flat_map(interface));
        object(out)
    })
}

fn file_system(path: &Path, time: &str) -> Value {
    let Ok(fs) = nix::sys::statvfs::statvfs(path) else { return json!({"time": time}) };
    let unit = fs.fragment_size();
    json!({
        "time": time,
        "availableBytes": fs.blocks_available() * unit,
        "capacityBytes": fs.blocks() * unit,
        "usedBytes": (fs.blocks() - fs.blocks_free()) * unit,
        "inodesFree": fs.files_free(),
        "inodes": fs.files(),
        "inodesUsed": fs.files().saturating_sub(fs.files_free()),
    })
}

fn rlimit(time: &str) -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let max: Option<i64> = read("/proc/sys/kernel/pid_max").trim().parse().ok();
    // `1.00 0.50 0.25 2/345 6789`: tasks that run and that there are.
    let now: Option<i64> = read("/proc/loadavg").split([' ', '/']).nth(4).and_then(|n| n.parse().ok());
    object([("time", json!(time)), ("maxpid", json!(max)), ("curproc", json!(now))])
}

/// Ticks in which some CPU was busy: all but idle and waiting for disks.
fn busy_ticks(stat: &str) -> u64 {
    let Some(line) = stat.lines().find_map(|l| l.strip_prefix("cpu ")) else { return 0 };
    let ticks = line.split_whitespace().map(|n| n.parse::<u64>().unwrap_or(0));
    // Guests' time is in that of their user already.
    ticks.enumerate().filter(|(i, _)| ![3, 4, 8, 9].contains(i)).map(|(_, n)| n).sum()
}

/// `name: 12 kB` and `name 12` lines.
fn numbers(text: &str, unit: u64) -> BTreeMap<String, u64> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let name = words.next()?.trim_end_matches(':').to_owned();
            Some((name, words.next()?.parse::<u64>().ok()?.saturating_mul(unit)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_read_from_proc() {
        assert_eq!(busy_ticks("cpu  10 1 5 1000 50 2 3 4 7 0\ncpu0 1 1 1 1\n"), 25);
        let memory = numbers("MemTotal:       1000 kB\nInactive(file):  10 kB\n", 1024);
        assert_eq!(memory.get("Inactive(file)"), Some(&10_240));
        assert_eq!(numbers("pgfault 7\n", 1).get("pgfault"), Some(&7));
    }

    #[test]
    fn resource_samples_bear_the_time_of_their_measurement() {
        let cpu = v1::CpuUsage {
            timestamp: 1_700_000_000_123_456_789,
            usage_core_nano_seconds: Some(v1::UInt64Value { value: 1_500_000_000 }),
            ..Default::default()
        };
        let mut text = Text::default();
        text.usage("container", &labels([("container", "a\"b"), ("pod", "p")]), Some(&cpu), None);
        assert_eq!(
            text.finish(),
            "# HELP container_cpu_usage_seconds_total container cpu usage seconds total\n\
             # TYPE container_cpu_usage_seconds_total counter\n\
             container_cpu_usage_seconds_total{container=\"a\\\"b\",pod=\"p\"} 1.5 1700000000123\n"
        );
    }

    #[test]
    fn swap_has_its_limit_and_a_pods_is_that_of_its_containers() {
        let bytes = |value| Some(v1::UInt64Value { value });
        let container = |name: &str, at: i64, used: u64| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                metadata: Some(v1::ContainerMetadata { name: name.into(), attempt: 0 }),
                ..Default::default()
            }),
            swap: Some(v1::SwapUsage {
                timestamp: at * 1_000_000,
                swap_usage_bytes: bytes(used),
                swap_available_bytes: bytes(100),
            }),
            ..Default::default()
        };
        let mut pod = Pod {
            name: "p".into(),
            namespace: "n".into(),
            uid: "u".into(),
            object: Value::Null,
            stats: v1::LinuxPodSandboxStats {
                containers: vec![container("a", 5, 10), container("b", 4, 20)],
                ..Default::default()
            },
        };
        let swap = pod_swap(&pod).unwrap();
        assert_eq!((swap.timestamp, swap.swap_usage_bytes), (4_000_000, bytes(30)));
        let mut text = Text::default();
        text.swap("", pod.stats.containers[0].swap.as_ref());
        let text = text.finish();
        assert!(text.contains("container_swap_usage_bytes 10 5\n"), "{text}");
        assert!(text.contains("container_swap_limit_bytes 110 5\n"), "{text}");
        pod.stats.containers[0].swap = None;
        assert_eq!(pod_swap(&pod), None, "a part is not the whole");
    }

    #[test]
    fn of_a_container_only_the_newest_instance_counts() {
        let stats = |attempt| v1::ContainerStats {
            attributes: Some(v1::ContainerAttributes {
                metadata: Some(v1::ContainerMetadata { name: "c".into(), attempt }),
                ..Default::default()
            }),
            ..Default::default()
        };
        let all = [stats(1), stats(3), stats(2)];
        let found = newest(&all)["c"].attributes.as_ref().unwrap().metadata.as_ref().unwrap().attempt;
        assert_eq!(found, 3);
    }
}

//! `quintctl top`: the resource usage, delays and queues of the services, and the resource usage of the pods.
//!
//! Rates are computed from two samples, an interval apart. In a terminal the table is refreshed until `q` is
//! pressed.

use std::collections::BTreeMap;
use std::time::Duration;

use crossterm::event::{Event, EventStream, KeyCode, KeyModifiers};
use futures::StreamExt as _;
use quintctl_measures::{Queue, cpu_seconds, memory, queues, sums, value};
use quintctl_text::{NOTHING, age, clean, fit, table};
use quintlet_cri_api::v1::{ContainerStatsFilter, ListContainerStatsRequest, ListContainerStatsResponse};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::lists;
use quintlet_proto::debug::v1::MetricsRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use quintlet_proto::pleg::v1::HealthReply;
use quintlet_proto::podsync::v1::pod_sync_client::PodSyncClient;
use quintlet_proto::podsync::v1::{ListPodsRequest, PodView};
use ratatui::widgets::Paragraph;
use serde::Serialize;
use tokio::time::Instant;

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};
use crate::pods::display_name;
use crate::{health, screen, version};

/// Histograms of the time that work waits in a service: for a slot of the runtime, from an event of the
/// runtime to its receipt, from the scheduled start of a probe, from a change of a pod's status to its write.
const LAGS: [(&str, &str); 4] = [
    ("cri-proxy", "quintlet_cri_queue_seconds"),
    ("pleg-service", "kubelet_evented_pleg_connection_latency_seconds"),
    ("probe-service", "quintlet_probe_lag_seconds"),
    ("status-reporter", "kubelet_pod_status_sync_duration_seconds"),
];

/// Show the resource usage of services and pods, and the queues of the services.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TopArgs {
    /// Interval between samples, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) interval: u64,
    /// Print once and exit, also in a terminal
    #[arg(long)]
    pub(crate) once: bool,
}

/// Prints one table, or refreshes it in a terminal until the user quits.
///
/// # Errors
/// pod-sync is not reachable at the start, the terminal cannot be used, or standard output is closed.
pub(crate) async fn run(args: TopArgs, paths: &Paths, format: Format) -> Result<(), Error> {
    Peer::pod_sync(paths).channel().await?;
    let interval = Duration::from_secs(args.interval);
    let live = !args.once && screen::is_possible() && matches!(format, Format::Table | Format::Wide);
    let mut before = sample(paths).await;
    if !live {
        tokio::time::sleep(interval).await;
        let top = between(&before, &sample(paths).await);
        return print(format.render(&top, |wide| render(&top, wide))?);
    }
    let mut terminal = ratatui::try_init().map_err(Error::os("use the terminal"))?;
    let _restored = screen::Restored;
    let mut keys = EventStream::new();
    let mut text = "measuring …\n".to_owned();
    let mut next = Instant::now() + interval;
    loop {
        let draw = |frame: &mut ratatui::Frame<'_>| {
            let width = usize::from(frame.area().width);
            let lines: Vec<String> = text.lines().map(|l| fit(l, width)).collect();
            frame.render_widget(Paragraph::new(lines.join("\n")), frame.area());
        };
        terminal.draw(draw).map_err(Error::os("draw on the terminal"))?;
        // Both arms only wait; dropping them loses nothing.
        tokio::select! {
            key = keys.next() => match key {
                Some(Ok(Event::Key(key))) => {
                    let control = key.modifiers.contains(KeyModifiers::CONTROL);
                    if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || control && key.code == KeyCode::Char('c') {
                        return Ok(());
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return Ok(()),
            },
            () = tokio::time::sleep_until(next) => {
                let now = sample(paths).await;
                text = render(&between(&before, &now), format == Format::Wide) + "\nq quit\n";
                before = now;
                next = Instant::now() + interval;
            }
        }
    }
}

/// The counters and states at one moment.
#[derive(Debug, Clone)]
struct Sample {
    at: Instant,
    services: Vec<Process>,
    pods: Vec<PodView>,
    /// CPU time in nanoseconds and working set in bytes, by pod UID.
    usage: BTreeMap<String, (u64, u64)>,
    pleg: Option<HealthReply>,
    /// Total seconds and number of probes, over all instances of probe-service.
    probes: Option<(f64, f64)>,
    /// Total seconds and number of inspections.
    inspections: Option<(f64, f64)>,
}

#[derive(Debug, Clone)]
struct Process {
    name: String,
    pid: Option<u32>,
    uptime: Option<f64>,
    cpu_seconds: Option<f64>,
    memory: Option<u64>,
    queues: Vec<Queue>,
    /// Total seconds and number of [`LAGS`].
    lag: Option<(f64, f64)>,
}

impl Process {
    /// Returns whether this is the process of an earlier sample, which has not used more.
    fn is_same(&self, earlier: &Self) -> bool {
        self.name == earlier.name && self.pid == earlier.pid && self.cpu_seconds >= earlier.cpu_seconds
    }
}

async fn sample(paths: &Paths) -> Sample {
    let (versions, seen, usage, pods) =
        tokio::join!(version::fetch(paths), health::overview(paths), Box::pin(usage(paths)), pods(paths));
    let peers = Peer::all(paths);
    let rows = versions.into_iter().filter_map(|row| {
        let peer = peers.iter().find(|peer| peer.service == row.service)?;
        Some(process(peer, row))
    });
    let mut services = Vec::new();
    let (mut probes, mut inspections) = (None, None);
    for (process, text) in futures::future::join_all(rows).await {
        if process.name.starts_with("probe-service") {
            probes = add(probes, sums(&text, "prober_probe_duration_seconds"));
        } else if process.name == "pleg-service" {
            inspections = sums(&text, "kubelet_pleg_pod_relist_duration_seconds");
        }
        services.push(process);
    }
    Sample {
        at: Instant::now(),
        services,
        pods: pods.unwrap_or_default(),
        usage: usage.unwrap_or_default(),
        pleg: seen.pleg,
        probes,
        inspections,
    }
}

/// Returns what a service uses, from `/proc` or, if its process is in another PID namespace, as in another
/// container, from its metrics, which are returned, too.
async fn process(peer: &Peer, row: version::Row) -> (Process, String) {
    let (name, uptime) = (row.service, row.uptime_seconds);
    let text = metrics(peer).await;
    let of_service = |(service, _): &&(&str, &str)| name.split(' ').next() == Some(*service);
    let lag = LAGS.iter().find(of_service).and_then(|(_, histogram)| sums(&text, histogram));
    let queues = queues(&text);
    let here = match server_pid(peer).await {
        Some(pid) if row.pid == Some(pid) => Some(pid),
        Some(_) | None => None,
    };
    let (cpu_seconds, memory) = match here {
        Some(pid) => (cpu_seconds(pid), memory(pid)),
        None => (
            value(&text, "process_cpu_seconds_total"),
            value(&text, "process_resident_memory_bytes").map(bytes),
        ),
    };
    (Process { name, pid: here, uptime, cpu_seconds, memory, queues, lag }, text)
}

/// Returns the process that serves a socket, in the PID namespace of this process.
pub(crate) async fn server_pid(peer: &Peer) -> Option<u32> {
    let stream = tokio::net::UnixStream::connect(&peer.path).await.ok()?;
    let pid = stream.peer_cred().ok()?.pid()?;
    // The kernel gives 0 for a process of another namespace.
    u32::try_from(pid).ok().filter(|pid| *pid > 0)
}

async fn pods(paths: &Paths) -> Result<Vec<PodView>, Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = PodSyncClient::new(peer.channel().await?);
    Ok(peer.list(client.list_pods(ListPodsRequest { brief: true })).await?.pods)
}

async fn usage(paths: &Paths) -> Result<BTreeMap<String, (u64, u64)>, Error> {
    let peer = Peer::cri_proxy(paths);
    let channel = peer.channel().await?;
    let request = ListContainerStatsRequest { filter: Some(ContainerStatsFilter::default()) };
    let mut out: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let take = |message: ListContainerStatsResponse| {
        for stats in message.stats {
            let labels = stats.attributes.map(|a| a.labels).unwrap_or_default();
            let Some(uid) = labels.get("io.kubernetes.pod.uid") else { continue };
            let cpu = stats.cpu.and_then(|c| c.usage_core_nano_seconds).map_or(0, |v| v.value);
            let memory = stats.memory.and_then(|m| m.working_set_bytes).map_or(0, |v| v.value);
            let sum = out.entry(uid.clone()).or_default();
            *sum = (sum.0 + cpu, sum.1 + memory);
        }
    };
    let listing = lists::CONTAINER_STATS.each(channel, tonic::Request::new(request), take);
    peer.call(async { listing.await.map(tonic::Response::new) }).await?;
    Ok(out)
}

async fn metrics(peer: &Peer) -> String {
    let text = async {
        let mut client = DebugClient::new(peer.channel().await?);
        Ok::<_, Error>(peer.list(client.metrics(MetricsRequest {})).await?.text)
    };
    text.await.unwrap_or_default()
}

/// Returns a gauge of bytes as a number.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of a float saturates")]
fn bytes(value: f64) -> u64 {
    value as u64
}

fn add(a: Option<(f64, f64)>, b: Option<(f64, f64)>) -> Option<(f64, f64)> {
    match (a, b) {
        (Some(a), Some(b)) => Some((a.0 + b.0, a.1 + b.1)),
        (a, b) => a.or(b),
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Top {
    services: Vec<ServiceTop>,
    pods: Vec<PodTop>,
    pleg: Option<PlegTop>,
    /// Mean duration of the probes in the interval, milliseconds; none without a probe.
    probe_ms: Option<f64>,
    probes_per_second: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ServiceTop {
    service: String,
    pid: Option<u32>,
    uptime_seconds: Option<f64>,
    /// Percent of one core.
    cpu_percent: Option<f64>,
    memory_bytes: Option<u64>,
    /// Mean of what waited in the interval, milliseconds.
    lag_ms: Option<f64>,
    queues: Vec<Queue>,
}

impl ServiceTop {
    /// Returns the queue that is closest to its bound, unless all are empty.
    fn fullest(&self) -> Option<&Queue> {
        let share = |queue: &&Queue| queue.waiting.saturating_mul(1000) / queue.capacity.max(1);
        self.queues.iter().filter(|queue| queue.waiting > 0).max_by_key(share)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodTop {
    name: String,
    namespace: String,
    uid: String,
    status: String,
    ready: String,
    restarts: u32,
    cpu_percent: Option<f64>,
    memory_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct PlegTop {
    last_list_age_seconds: Option<f64>,
    relist_period_seconds: f64,
    hints: String,
    hints_live: bool,
    /// Mean duration of the inspections in the interval, milliseconds.
    inspection_ms: Option<f64>,
}

fn between(before: &Sample, now: &Sample) -> Top {
    let seconds = now.at.duration_since(before.at).as_secs_f64().max(0.001);
    let mean = |a: Option<(f64, f64)>, b: Option<(f64, f64)>| {
        let ((sum, count), (old_sum, old_count)) = (b?, a.unwrap_or_default());
        // The counters of a restarted service begin at zero.
        let (sum, count) = if count < old_count { (sum, count) } else { (sum - old_sum, count - old_count) };
        (count > 0.0).then(|| (sum / count * 1000.0, count / seconds))
    };
    let services = now
        .services
        .iter()
        .map(|p| {
            let old = before.services.iter().find(|old| p.is_same(old));
            let cpu = old.and_then(|o| Some((p.cpu_seconds? - o.cpu_seconds?) / seconds * 100.0));
            ServiceTop {
                service: p.name.clone(),
                pid: p.pid,
                uptime_seconds: p.uptime,
                cpu_percent: cpu,
                memory_bytes: p.memory,
                lag_ms: mean(
                    before.services.iter().find(|old| old.name == p.name).and_then(|old| old.lag),
                    p.lag,
                )
                .map(|(ms, _)| ms),
                queues: p.queues.clone(),
            }
        })
        .collect();
    let mut pods: Vec<PodTop> = now
        .pods
        .iter()
        .map(|pod| {
            let new = now.usage.get(&pod.uid);
            // A smaller value belongs to another container instance, whose start time is unknown here.
            let used = new.zip(before.usage.get(&pod.uid)).and_then(|(n, o)| n.0.checked_sub(o.0));
            PodTop {
                name: pod.name.clone(),
                namespace: pod.namespace.clone(),
                uid: pod.uid.clone(),
                status: pod.status.clone(),
                ready: pod.ready.clone(),
                restarts: pod.restarts,
                cpu_percent: used.map(|ns| Duration::from_nanos(ns).as_secs_f64() / seconds * 100.0),
                memory_bytes: new.map(|n| n.1),
            }
        })
        .collect();
    pods.sort_by(|a, b| {
        b.cpu_percent
            .unwrap_or(-1.0)
            .total_cmp(&a.cpu_percent.unwrap_or(-1.0))
            .then_with(|| a.name.cmp(&b.name))
    });
    let probes = mean(before.probes, now.probes);
    Top {
        services,
        pods,
        pleg: now.pleg.as_ref().map(|p| PlegTop {
            last_list_age_seconds: p.last_list_age_seconds,
            relist_period_seconds: p.relist_period_seconds,
            hints: p.hint_source.clone(),
            hints_live: p.hints_live,
            inspection_ms: mean(before.inspections, now.inspections).map(|(ms, _)| ms),
        }),
        probe_ms: probes.map(|(ms, _)| ms),
        probes_per_second: probes.map(|(_, rate)| rate),
    }
}

/// Returns the tables; `wide` adds one of all queues.
#[must_use]
pub(crate) fn render(top: &Top, wide: bool) -> String {
    let dash = || NOTHING.to_owned();
    let percent = |p: Option<f64>| p.map_or_else(dash, |p| format!("{p:.1}%"));
    let ms = |ms: Option<f64>| ms.map_or_else(dash, |ms| format!("{ms:.1}ms"));
    let size = |b: Option<u64>| b.map_or_else(dash, mebibytes);
    let memory: u64 = top.services.iter().filter_map(|s| s.memory_bytes).sum();
    let cpu: f64 = top.services.iter().filter_map(|s| s.cpu_percent).sum();
    let mut out = format!("services  {} of a core, {}\n", percent(Some(cpu)), mebibytes(memory));
    if let Some(pleg) = &top.pleg {
        let list = pleg
            .last_list_age_seconds
            .map_or_else(|| "no list yet".to_owned(), |s| format!("last list {s:.1}s ago"));
        let live = if pleg.hints_live { "live" } else { "not live" };
        out.push_str(&format!(
            "pleg      {list} (every {}s)   hints {} {live}   inspection {}\n",
            pleg.relist_period_seconds,
            clean(&pleg.hints),
            ms(pleg.inspection_ms)
        ));
    }
    let rate = top.probes_per_second.map_or_else(dash, |r| format!("{r:.1}/s"));
    out.push_str(&format!("probes    {rate}   {} each\n\n", ms(top.probe_ms)));
    let services: Vec<Vec<String>> = top
        .services
        .iter()
        .map(|s| {
            let up = s.uptime_seconds.and_then(|s| Duration::try_from_secs_f64(s).ok());
            vec![
                clean(&s.service),
                s.pid.map_or_else(dash, |p| p.to_string()),
                up.map_or_else(dash, |d| age(i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))),
                percent(s.cpu_percent),
                size(s.memory_bytes),
                ms(s.lag_ms),
                s.queues.iter().map(|queue| queue.dropped).fold(0, u64::saturating_add).to_string(),
                s.fullest()
                    .map_or_else(dash, |q| format!("{}/{} {}", q.waiting, q.capacity, clean(&q.queue))),
            ]
        })
        .collect();
    let header = ["SERVICE", "PID", "UP", "CPU", "MEMORY", "LAG", "DROPS", "FULLEST QUEUE"];
    out.push_str(&table(&header, &services));
    out.push('\n');
    if wide {
        let queues: Vec<Vec<String>> = top
            .services
            .iter()
            .flat_map(|s| s.queues.iter().map(move |queue| (s, queue)))
            .map(|(s, q)| {
                let numbers = [q.waiting, q.capacity, q.dropped].map(|number| number.to_string());
                [clean(&s.service), clean(&q.queue)].into_iter().chain(numbers).collect()
            })
            .collect();
        out.push_str(&table(&["SERVICE", "QUEUE", "WAITING", "BOUND", "DROPS"], &queues));
        out.push('\n');
    }
    let pods: Vec<Vec<String>> = top
        .pods
        .iter()
        .map(|p| {
            vec![
                display_name(&p.namespace, &p.name),
                clean(&p.ready),
                clean(&p.status),
                p.restarts.to_string(),
                percent(p.cpu_percent),
                size(p.memory_bytes),
            ]
        })
        .collect();
    out.push_str(&table(&["POD", "READY", "STATUS", "RESTARTS", "CPU", "MEMORY"], &pods));
    out
}

fn mebibytes(bytes: u64) -> String {
    let tenths = bytes.saturating_mul(10) >> 20;
    format!("{}.{}Mi", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(sample: &Sample, seconds: u64, cpu: f64, pod_ns: u64) -> Sample {
        let mut sample = sample.clone();
        sample.at += Duration::from_secs(seconds);
        sample.services[0].cpu_seconds = Some(cpu);
        sample.usage.insert("u".into(), (pod_ns, 3 << 20));
        sample
    }

    #[test]
    fn rates_are_relative_to_the_time_between_two_samples() {
        let pod = PodView {
            uid: "u".into(),
            name: "web".into(),
            namespace: "default".into(),
            ready: "1/1".into(),
            status: "Running".into(),
            ..PodView::default()
        };
        let process = Process {
            name: "pod-sync".into(),
            pid: Some(7),
            uptime: Some(65.0),
            cpu_seconds: Some(1.0),
            memory: Some(5 << 20),
            queues: queues(
                "quintlet_queue_depth{queue=\"a\"} 2\nquintlet_queue_capacity{queue=\"a\"} 1000\nquintlet_queue_dropped_total{queue=\"a\"} 3\n\
                 quintlet_queue_depth{queue=\"b\"} 1\nquintlet_queue_capacity{queue=\"b\"} 4\nquintlet_queue_dropped_total{queue=\"b\"} 0\n",
            ),
            lag: Some((0.5, 10.0)),
        };
        let first = Sample {
            at: Instant::now(),
            services: vec![process],
            pods: vec![pod],
            usage: BTreeMap::from([("u".to_owned(), (0, 0))]),
            pleg: Some(HealthReply {
                last_list_age_seconds: Some(0.34),
                hints_live: true,
                hint_source: "containerd".into(),
                relist_period_seconds: 30.0,
                ..HealthReply::default()
            }),
            probes: Some((1.0, 100.0)),
            inspections: None,
        };
        let mut second = at(&first, 2, 1.1, 500_000_000);
        second.probes = Some((1.02, 110.0));
        second.services[0].lag = Some((0.6, 20.0));
        let shown = render(&between(&first, &second), true);
        assert_eq!(
            shown,
            "\
services  5.0% of a core, 5.0Mi
pleg      last list 0.3s ago (every 30s)   hints containerd live   inspection –
probes    5.0/s   2.0ms each

SERVICE   PID  UP   CPU   MEMORY  LAG     DROPS  FULLEST QUEUE
pod-sync  7    65s  5.0%  5.0Mi   10.0ms  3      1/4 b

SERVICE   QUEUE  WAITING  BOUND  DROPS
pod-sync  a      2        1000   3
pod-sync  b      1        4      0

POD  READY  STATUS   RESTARTS  CPU    MEMORY
web  1/1    Running  0         25.0%  3.0Mi
"
        );
        // The table of all queues is for wide output alone.
        assert!(!render(&between(&first, &second), false).contains("BOUND"));
        // A restarted process has no rate yet; its histograms count from zero.
        second.services[0].pid = Some(8);
        second.probes = Some((0.03, 3.0));
        let top = between(&first, &second);
        assert_eq!((top.services[0].cpu_percent, top.probe_ms.map(f64::round)), (None, Some(10.0)));
        // A process of another PID namespace has no number here. It was replaced if it has used less.
        let hidden = |cpu| {
            let mut sample = at(&first, 2, cpu, 0);
            sample.services[0].pid = None;
            sample
        };
        let rate = |before, now| between(&hidden(before), &hidden(now)).services[0].cpu_percent;
        assert_eq!((rate(1.0, 1.0), rate(1.0, 0.5)), (Some(0.0), None));
    }

    #[tokio::test]
    async fn a_process_is_looked_up_only_if_it_serves_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let peer = Peer::new("pod-sync", dir.path().join("pod-sync.sock"));
        assert_eq!(server_pid(&peer).await, None);
        let listener = tokio::net::UnixListener::bind(&peer.path).unwrap();
        assert_eq!(server_pid(&peer).await, Some(std::process::id()));
        let row = |pid| version::Row {
            service: "pod-sync".into(),
            version: None,
            commit: None,
            pid: Some(pid),
            uptime_seconds: None,
            skew: false,
            error: None,
        };
        let (seen, _) = process(&peer, row(std::process::id())).await;
        assert!(seen.pid.is_some() && seen.memory.is_some());
        // Process 1 exists here, too. That a service has this number somewhere else says nothing about it.
        drop(listener);
        let (other, _) = process(&peer, row(1)).await;
        assert_eq!((other.pid, other.cpu_seconds, other.memory), (None, None, None));
    }

    #[test]
    fn the_value_of_a_metric_is_found_by_its_whole_name() {
        let text = "# TYPE a gauge\na_b 2.0\na 1.5e3\n";
        assert_eq!((value(text, "a"), value(text, "b"), bytes(1.5e3)), (Some(1500.0), None, 1500));
    }
}

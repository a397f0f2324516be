//! `/stats/summary`: the statistics of the node and its pods as JSON
//! (`staging/src/k8s.io/kubelet/pkg/apis/stats/v1alpha1`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use http::StatusCode;
use node_api_base::answer::{Answer, error, json as json_answer};
use node_api_base::pod_lookup;
use node_api_base::services::Services;
use quintlet_cri_api::v1;
use quintlet_kit::task;
use quintlet_proto::podsync::v1::PodStorage;
use serde_json::{Value, json};

use super::Stats;
use super::cri_stats::{cpu, io, memory, network, object, swap};
use super::disk::{RuntimeFiles, ephemeral, file_system, image_fs, logs, volume, writable};
use super::gather::{Pod, Pressure, newest, pod_swap};
use crate::host;

impl Stats {
    /// Responds to `/stats/summary`.
    pub async fn summary(self: &Arc<Self>, node: &Services, only_cpu_and_memory: bool) -> Answer {
        let storage = async { if only_cpu_and_memory { None } else { Some(storage(node).await) } };
        let (pods, storage) = tokio::join!(self.pods.all(node, true), storage);
        match pods {
            Ok(pods) => {
                let stats = Arc::clone(self);
                // Log directories, cgroups and file systems are read.
                let body = task::blocking(move || stats.whole(&pods, storage).to_string());
                json_answer(body.await)
            }
            Err(status) => {
                error(StatusCode::INTERNAL_SERVER_ERROR, format!("Internal Error: {}", status.message()))
            }
        }
    }

    /// Returns the summary, without disks if there is no `storage`.
    fn whole(&self, pods: &[Pod], storage: Option<Storage>) -> Value {
        let disk = storage.map(|storage| {
            let time = self.clock.wall().to_string();
            Disk { fs: file_system(&self.paths.root_dir, &time), time, storage }
        });
        let pods: Vec<Value> = pods.iter().map(|p| self.pod(p, disk.as_ref())).collect();
        json!({"node": self.node(disk.as_ref()), "pods": pods})
    }

    /// Returns the statistics of the node, without `disk` if only CPU and memory are requested.
    fn node(&self, disk: Option<&Disk>) -> Value {
        let m = self.machine.read();
        let time = m.time.to_string();
        let boot = jiff::SignedDuration::try_from(self.clock.boot()).unwrap_or_default();
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let system = self.system.all(m.time, disk.is_none());
        let psi = Pressure::of_machine(&self.paths.cgroups, Path::new("/proc"));
        let mut out = json!({
            "nodeName": self.node_name,
            "startTime": m.time.checked_sub(boot).unwrap_or(m.time).to_string(),
            "cpu": object([("time", json!(time)), ("usageNanoCores", json!(m.nano_cores)),
                ("usageCoreNanoSeconds", json!(m.cpu_nanos))]),
            "memory": {
                "time": time,
                "availableBytes": m.available(self.paths.subtracts_huge_pages),
                "usageBytes": m.used(),
                "workingSetBytes": m.working_set(),
                "rssBytes": m.rss(),
                "pageFaults": m.page_faults,
                "majorPageFaults": m.major_page_faults,
            },
            "systemContainers": system,
            "swap": {
                "time": time,
                "swapAvailableBytes": m.of("SwapFree"),
                "swapUsageBytes": m.of("SwapTotal").saturating_sub(m.of("SwapFree")),
            },
        });
        for (field, psi) in [("cpu", psi.cpu), ("memory", psi.memory)] {
            if !psi.is_null() {
                out[field]["psi"] = psi;
            }
        }
        let Some(disk) = disk else { return out };
        let network = host::network(&read("/proc/net/dev"), &read("/proc/net/route"), &time);
        for (field, value) in [("network", network), ("io", io(&time, &psi.io))] {
            if !value.is_null() {
                out[field] = value;
            }
        }
        out["fs"] = file_system(&self.paths.root_dir, &time);
        out["rlimit"] = rlimit(&time);
        if let Some(images) = disk.storage.images.image_filesystems.first() {
            // The container file system is reported if it differs from that of images.
            let containers = disk.storage.images.container_filesystems.first().unwrap_or(images);
            let stats = |fs| image_fs(fs, &disk.storage.runtime);
            out["runtime"] = json!({"imageFs": stats(images), "containerFs": stats(containers)});
        }
        out
    }

    /// Returns the statistics of a pod, without `disk` if only CPU and memory are requested.
    fn pod(&self, pod: &Pod, disk: Option<&Disk>) -> Value {
        let own = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
        let logs_dir = self.paths.pod_logs_dir.join(own);
        let containers: Vec<Value> = newest(&pod.stats.containers)
            .into_iter()
            .map(|(name, c)| {
                let started = pod_lookup::status(&pod.object, name)
                    .and_then(|s| s["state"]["running"]["startedAt"].as_str())
                    .map(str::to_owned);
                let id = c.attributes.as_ref().map(|a| a.id.as_str()).unwrap_or_default();
                let none = Pressure::default();
                let pressure = pod.pressures.get(id).unwrap_or(&none);
                let mut out = vec![
                    ("name", json!(name)),
                    ("startTime", json!(started)),
                    ("cpu", cpu(c.cpu.as_ref(), &pressure.cpu)),
                    ("memory", memory(c.memory.as_ref(), &pressure.memory)),
                    ("swap", swap(c.swap.as_ref())),
                ];
                if let Some(disk) = disk {
                    out.push(("io", io(&disk.time, &pressure.io)));
                    out.push(("rootfs", writable(c.writable_layer.as_ref(), &disk.storage.runtime)));
                    out.push(("logs", logs(&logs_dir.join(name), &disk.fs, &disk.time)));
                }
                object(out)
            })
            .collect();
        let mut out = vec![
            ("podRef", json!({"name": pod.name, "namespace": pod.namespace, "uid": pod.uid})),
            ("startTime", pod.object["status"]["startTime"].clone()),
            ("cpu", cpu(pod.stats.cpu.as_ref(), &pod.pressure.cpu)),
            ("memory", memory(pod.stats.memory.as_ref(), &pod.pressure.memory)),
            ("swap", pod_swap(pod).map_or(Value::Null, |s| swap(Some(&s)))),
        ];
        if let Some(disk) = disk {
            out.push(("io", io(&disk.time, &pod.pressure.io)));
            out.push(("network", network(pod.stats.network.as_ref())));
            if let Some(count) = pod.stats.process.as_ref().and_then(|p| p.process_count.as_ref()) {
                out.push(("process_stats", json!({"process_count": count.value})));
            }
            let storage = disk.storage.pods.get(&pod.uid);
            if let Some(storage) = storage.filter(|s| !s.volumes.is_empty()) {
                let (own, others): (Vec<_>, Vec<_>) = storage.volumes.iter().partition(|v| v.is_ephemeral);
                let volumes: Vec<Value> = own.into_iter().chain(others).map(volume).collect();
                out.push(("volume", json!(volumes)));
            }
            let pod_logs = logs(&logs_dir, &disk.fs, &disk.time);
            let whole = ephemeral(&disk.fs, &disk.time, &containers, &pod_logs, storage);
            out.push(("ephemeral-storage", whole));
        }
        out.push(("containers", json!(containers)));
        object(out)
    }
}

/// Disk statistics that are read once for all pods.
struct Disk {
    time: String,
    /// File system of the root directory.
    fs: Value,
    storage: Storage,
}

/// Measurements of pod-sync and the runtime.
#[derive(Default)]
struct Storage {
    /// File systems of images and containers; none if the runtime does not answer.
    images: v1::ImageFsInfoResponse,
    /// Volumes by pod.
    pods: BTreeMap<String, PodStorage>,
    runtime: RuntimeFiles,
}

async fn storage(node: &Services) -> Storage {
    let mut runtime = v1::image_service_client::ImageServiceClient::new(node.cri());
    let (images, volumes) = tokio::join!(runtime.image_fs_info(v1::ImageFsInfoRequest {}), node.storage());
    let images = images.map(tonic::Response::into_inner).unwrap_or_default();
    match volumes {
        Ok(reply) => Storage {
            images,
            pods: reply.pods.into_iter().map(|pod| (pod.uid.clone(), pod)).collect(),
            runtime: reply.runtime.into_iter().filter_map(|fs| Some((fs.mountpoint, fs.usage?))).collect(),
        },
        // An older pod-sync does not measure.
        Err(status) => {
            tracing::debug!(error = status.message(), "failed to get volume statistics");
            Storage { images, ..Storage::default() }
        }
    }
}

fn rlimit(time: &str) -> Value {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let max = max_pid(&read("/proc/sys/kernel/pid_max"), &read("/proc/sys/kernel/threads-max"));
    // `1.00 0.50 0.25 2/345 6789`: running and existing tasks.
    let now: Option<i64> = read("/proc/loadavg").split([' ', '/']).nth(4).and_then(|n| n.parse().ok());
    object([("time", json!(time)), ("maxpid", json!(max)), ("curproc", json!(now))])
}

/// Returns the smaller of both limits of the kernel (`pkg/kubelet/stats/pidlimit: Stats`).
fn max_pid(pid_max: &str, threads_max: &str) -> Option<i64> {
    [pid_max, threads_max].into_iter().filter_map(|text| text.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_limit_is_the_smaller_one_of_the_kernel() {
        for (pid_max, threads_max, want) in [
            ("4194304\n", "127000\n", Some(127_000)),
            ("32768\n", "127000\n", Some(32_768)),
            ("", "127000\n", Some(127_000)),
            ("32768\n", "", Some(32_768)),
            ("", "", None),
        ] {
            assert_eq!(max_pid(pid_max, threads_max), want, "{pid_max:?} {threads_max:?}");
        }
    }
}

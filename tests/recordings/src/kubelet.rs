//! Runs a kubelet on the fake runtime.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail};
use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::cluster::Cluster;
use crate::runtime::{ALLOWED_SYSCTLS, CLUSTER_DNS, CLUSTER_DOMAIN, NODE, RESOLV_CONF};
use crate::waiting::until;

/// Time that the kubelet has to exit.
const GRACE: Duration = Duration::from_secs(5);

/// A running kubelet. Dropping it stops the kubelet and removes its mounts and cgroups.
#[derive(Debug)]
pub struct Kubelet {
    child: Child,
    base: PathBuf,
    cgroup_root: String,
}

impl Kubelet {
    /// Starts `binary` as the node [`NODE`], with all its files and the runtime's socket under `base`.
    ///
    /// # Errors
    /// Fails if it cannot be started.
    pub fn start(binary: &Path, kubeconfig: &Path, base: &Path) -> anyhow::Result<Self> {
        let cgroup_root = format!("/qrec-{}", std::process::id());
        let made = groups(&cgroup_root).into_iter().try_for_each(std::fs::create_dir_all);
        made.with_context(|| format!("cgroup {cgroup_root}"))?;
        std::fs::create_dir_all(base.join("manifests"))?;
        std::fs::write(base.join("resolv.conf"), RESOLV_CONF)?;
        let at = |name: &str| base.join(name).display().to_string();
        let config = serde_json::json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "allowedUnsafeSysctls": ALLOWED_SYSCTLS,
            "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": false}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup_root,
            "clusterDNS": [CLUSTER_DNS],
            "clusterDomain": CLUSTER_DOMAIN,
            "containerRuntimeEndpoint": format!("unix://{}", at("runtime.sock")),
            "enableServer": false,
            "evictionHard": {"memory.available": "1Mi"},
            "failCgroupV1": false,
            "failSwapOn": false,
            "healthzPort": 0,
            "imageGCHighThresholdPercent": 100,
            "podLogsDir": at("pod-logs"),
            "resolvConf": at("resolv.conf"),
            "staticPodPath": at("manifests"),
            "fileCheckFrequency": "1s",
        });
        std::fs::write(base.join("kubelet.yaml"), config.to_string())?;
        let log = File::create(base.join("kubelet.log"))?;
        let child = Command::new(binary)
            .args(["--config", &at("kubelet.yaml"), "--root-dir", &at("root"), "--cert-dir", &at("cert")])
            .args(["--hostname-override", NODE])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{}", binary.display()))?;
        Ok(Self { child, base: base.to_owned(), cgroup_root })
    }

    /// Waits until the node is ready, and returns its address.
    ///
    /// # Errors
    /// Fails with the end of the kubelet's log if the node does not become ready.
    pub async fn wait_ready(&self, cluster: &Cluster) -> anyhow::Result<String> {
        let ready = until("the node", async || {
            let node = cluster.get(&format!("/api/v1/nodes/{NODE}")).await?.unwrap_or_default();
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            let ready = conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
            let addresses = node["status"]["addresses"].as_array().cloned().unwrap_or_default();
            let address =
                addresses.iter().find(|a| a["type"] == "InternalIP").and_then(|a| a["address"].as_str());
            Ok(address.filter(|_| ready).map(str::to_owned).ok_or_else(|| format!("{conditions:?}")))
        });
        let error = match ready.await {
            Ok(address) => return Ok(address),
            Err(error) => error,
        };
        let log = std::fs::read_to_string(self.base.join("kubelet.log"))?;
        let end: Vec<&str> = log.lines().rev().take(20).collect();
        bail!("{error:#}\n{}", end.into_iter().rev().collect::<Vec<_>>().join("\n"));
    }

    /// Returns the kubelet's cgroup.
    #[must_use]
    pub fn cgroup_root(&self) -> &str {
        &self.cgroup_root
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        let _already_gone = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
        let clock = quintlet_kit::clock::Clock::system();
        let until = clock.boot() + GRACE;
        while matches!(self.child.try_wait(), Ok(None)) && clock.boot() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _already_gone = self.child.kill();
        let _already_gone = self.child.wait();
        let base = self.base.display().to_string();
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for at in mounts.lines().filter_map(|l| l.split(' ').nth(1)).filter(|at| at.starts_with(&base)) {
            let _already_gone = nix::mount::umount2(at, MntFlags::MNT_DETACH);
        }
        for dir in groups(&self.cgroup_root) {
            remove_group(&dir);
        }
    }
}

/// Returns the version that a kubelet reports.
///
/// # Errors
/// Fails if the program cannot be run.
pub fn version(binary: &Path) -> anyhow::Result<String> {
    let output = Command::new(binary).arg("--version").output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Returns the directories of a cgroup: one per controller, or one.
fn groups(root: &str) -> Vec<PathBuf> {
    let all = Path::new("/sys/fs/cgroup");
    let name = root.trim_start_matches('/');
    if all.join("cgroup.controllers").exists() {
        return vec![all.join(name)];
    }
    let entries = std::fs::read_dir(all).into_iter().flatten().flatten();
    // Other names of the same directories are links.
    let dirs = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    dirs.map(|e| e.path().join(name)).collect()
}

/// Removes a cgroup and its descendants. Only directories can be removed there.
fn remove_group(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let _not_there = std::fs::remove_dir(dir);
}

//! The families `machine_*` and `cadvisor_version_info` of `/metrics/cadvisor` (google/cadvisor,
//! metrics/prometheus_machine.go).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use quintlet_model::cpu_list::CpuList;

use super::prometheus::{Text, labels, whole};

/// Kinds of persistent memory. Their families are 0 as in a kubelet, which is built without the library that
/// reads them.
const NVM_MODES: [&str; 2] = ["app_direct_mode", "memory_mode"];
/// Bounds on the directories that are read below `/sys`.
const MAX_CPUS: usize = 8192;
const MAX_MODULES: usize = 4096;

/// The hardware and the operating system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct MachineInfo {
    machine_id: String,
    system_uuid: String,
    boot_id: String,
    kernel: String,
    os: String,
    /// Logical CPUs that are online.
    cpus: u64,
    cores: u64,
    sockets: u64,
    /// Groups of sockets on s390x.
    books: u64,
    drawers: u64,
    /// Memory modules by type: number and bytes.
    modules: BTreeMap<String, (u64, u64)>,
}

impl MachineInfo {
    /// Reads `/sys`, `/proc` and `/etc` below `root`. A fact that cannot be read is empty or 0; the UUID of
    /// the firmware may be read by root only.
    pub(super) fn read(root: &Path) -> Self {
        let text = |file: &str| std::fs::read_to_string(root.join(file)).unwrap_or_default();
        let first = |files: &[&str]| {
            let texts = files.iter().map(|file| text(file).trim().trim_end_matches('\0').trim().to_owned());
            texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
        };
        let release = first(&["etc/os-release", "usr/lib/os-release"]);
        let os = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
        let online = CpuList::parse(text("sys/devices/system/cpu/online").trim()).unwrap_or_default();
        let topology = topology(&root.join("sys/devices/system/cpu"));
        Self {
            machine_id: first(&["etc/machine-id", "var/lib/dbus/machine-id"]),
            system_uuid: first(&[
                "sys/class/dmi/id/product_uuid",
                "proc/device-tree/system-id",
                "proc/device-tree/vm,uuid",
            ]),
            boot_id: first(&["proc/sys/kernel/random/boot_id"]),
            kernel: first(&["proc/sys/kernel/osrelease"]),
            os: os.map_or("Linux", |name| name.trim_matches('"')).to_owned(),
            cpus: count(online.count()),
            modules: modules(&root.join("sys/devices/system/edac/mc")),
            ..topology
        }
    }

    /// Writes the families. `memory` and `swap` are in bytes.
    pub(super) fn write(&self, out: &mut Text, memory: u64, swap: u64, now: i64) {
        let version = labels([
            ("cadvisorRevision", ""),
            ("cadvisorVersion", ""),
            ("dockerVersion", ""),
            ("kernelVersion", &self.kernel),
            ("osVersion", &self.os),
        ]);
        out.sample("cadvisor_version_info", "gauge", &version, 1.0, None);
        let ids = [
            ("boot_id", self.boot_id.as_str()),
            ("machine_id", &self.machine_id),
            ("system_uuid", &self.system_uuid),
        ];
        let base = labels(ids);
        for (name, value) in [
            ("machine_cpu_books", self.books),
            ("machine_cpu_cores", self.cpus),
            ("machine_cpu_drawers", self.drawers),
            ("machine_cpu_physical_cores", self.cores),
            ("machine_cpu_sockets", self.sockets),
            ("machine_memory_bytes", memory),
            ("machine_nvm_avg_power_budget_watts", 0),
            ("machine_swap_bytes", swap),
        ] {
            out.sample(name, "gauge", &base, whole(value), Some(now));
        }
        for (kind, (number, bytes)) in &self.modules {
            let labels = format!("{base},{}", labels([("type", kind)]));
            out.sample("machine_dimm_count", "gauge", &labels, whole(*number), Some(now));
            out.sample("machine_dimm_capacity_bytes", "gauge", &labels, whole(*bytes), Some(now));
        }
        for mode in NVM_MODES {
            let labels = format!("{base},{}", labels([("mode", mode)]));
            out.sample("machine_nvm_capacity", "gauge", &labels, 0.0, Some(now));
        }
    }
}

fn count(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

/// Counts cores, sockets, books and drawers in `/sys/devices/system/cpu`. CPUs that are offline have no
/// topology.
fn topology(dir: &Path) -> MachineInfo {
    let mut cores = BTreeSet::new();
    let [mut sockets, mut books, mut drawers] = [(); 3].map(|()| BTreeSet::new());
    for cpu in std::fs::read_dir(dir).into_iter().flatten().flatten().take(MAX_CPUS) {
        let name = cpu.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("cpu"));
        if !number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit())) {
            continue;
        }
        let topology = cpu.path().join("topology");
        let id = |file: &str| std::fs::read_to_string(topology.join(file)).ok()?.trim().parse::<u64>().ok();
        let socket = id("physical_package_id");
        // IDs of cores are unique within a socket only.
        cores.extend(id("core_id").map(|core| (socket, core)));
        sockets.extend(socket);
        books.extend(id("book_id"));
        drawers.extend(id("drawer_id"));
    }
    MachineInfo {
        cores: count(cores.len()),
        sockets: count(sockets.len()),
        books: count(books.len()),
        drawers: count(drawers.len()),
        ..MachineInfo::default()
    }
}

/// Returns number and bytes of memory modules by type from `/sys/devices/system/edac/mc`.
fn modules(dir: &Path) -> BTreeMap<String, (u64, u64)> {
    let below = |dir: &Path, prefix: &'static str| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .filter(move |entry| {
                let name = entry.file_name();
                let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
                number.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()))
            })
            .map(|entry| entry.path())
    };
    let mut all: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for module in below(dir, "mc").flat_map(|controller| below(&controller, "dimm")).take(MAX_MODULES) {
        let read = |file: &str| std::fs::read_to_string(module.join(file)).ok();
        let Some(kind) = read("dimm_mem_type") else { continue };
        let Some(mebibytes) = read("size").and_then(|size| size.trim().parse::<u64>().ok()) else { continue };
        let (number, bytes) = all.entry(kind.trim().to_owned()).or_default();
        *number = number.saturating_add(1);
        *bytes = bytes.saturating_add(mebibytes.saturating_mul(1 << 20));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_the_machine_come_from_its_files() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert_eq!(
            MachineInfo::read(root.path()),
            MachineInfo { os: "Linux".into(), ..MachineInfo::default() },
            "files may be missing"
        );
        write("etc/machine-id", "abc\n");
        write("etc/os-release", "NAME=x\nPRETTY_NAME=\"Debian 13\"\n");
        write("proc/sys/kernel/random/boot_id", "b-1\n");
        write("proc/sys/kernel/osrelease", "6.12.0\n");
        write("proc/device-tree/vm,uuid", "u-1\0");
        write("sys/devices/system/cpu/online", "0-4\n");
        // Two sockets with the same core IDs, one of them with two threads per core; the directories cpuidle
        // and cpufreq are no CPUs.
        for (cpu, socket, core) in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 1, 1)] {
            let dir = format!("sys/devices/system/cpu/cpu{cpu}/topology");
            write(&format!("{dir}/physical_package_id"), &format!("{socket}\n"));
            write(&format!("{dir}/core_id"), &format!("{core}\n"));
        }
        write("sys/devices/system/cpu/cpuidle/topology/core_id", "9\n");
        for (module, kind, size) in [(0, "DDR4", 16_384), (1, "DDR4", 16_384), (2, "Unbuffered-DDR3", 1024)] {
            let dir = format!("sys/devices/system/edac/mc/mc0/dimm{module}");
            write(&format!("{dir}/dimm_mem_type"), &format!("{kind}\n"));
            write(&format!("{dir}/size"), &format!("{size}\n"));
        }
        write("sys/devices/system/edac/mc/power/size", "1\n");
        let mut out = Text::default();
        MachineInfo::read(root.path()).write(&mut out, 1000, 20, 7);
        let text = out.finish();
        let ids = r#"boot_id="b-1",machine_id="abc",system_uuid="u-1""#;
        for line in [
            r#"cadvisor_version_info{cadvisorRevision="",cadvisorVersion="",dockerVersion="",kernelVersion="6.12.0",osVersion="Debian 13"} 1"#.to_owned(),
            format!("machine_cpu_cores{{{ids}}} 5 7"),
            format!("machine_cpu_physical_cores{{{ids}}} 4 7"),
            format!("machine_cpu_sockets{{{ids}}} 2 7"),
            format!("machine_cpu_books{{{ids}}} 0 7"),
            format!("machine_cpu_drawers{{{ids}}} 0 7"),
            format!("machine_memory_bytes{{{ids}}} 1000 7"),
            format!("machine_swap_bytes{{{ids}}} 20 7"),
            format!("machine_dimm_count{{{ids},type=\"DDR4\"}} 2 7"),
            format!("machine_dimm_capacity_bytes{{{ids},type=\"Unbuffered-DDR3\"}} {} 7", 1_u64 << 30),
            format!("machine_nvm_capacity{{{ids},mode=\"memory_mode\"}} 0 7"),
            format!("machine_nvm_avg_power_budget_watts{{{ids}}} 0 7"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }
}

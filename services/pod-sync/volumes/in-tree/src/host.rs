//! Block devices of the machine as sysfs and `/dev/disk` describe them
//! (`pkg/volume/util: device_util_linux.go`). All functions block.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use quintlet_kit::mount_table::Mount;

/// Directories of devices, which tests replace, and limits of waits.
#[derive(Debug, Clone)]
pub struct Host {
    /// `/dev`.
    pub dev: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// Limits of waits for devices and commands.
    pub limits: Limits,
}

/// Limits of waits for disks.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Limit of one call of iscsiadm.
    pub iscsiadm: Duration,
    /// Wait for a device to appear after its target was scanned (`deviceDiscoveryTimeout`).
    pub device: Duration,
    /// Wait for multipathd to make a device of several paths (`multipathDeviceTimeout`).
    pub multipath: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Above the retries of iscsiadm itself: eight logins of 15 seconds.
            iscsiadm: Duration::from_secs(150),
            device: Duration::from_secs(30),
            multipath: Duration::from_secs(10),
        }
    }
}

impl Default for Host {
    fn default() -> Self {
        Self { dev: PathBuf::from("/dev"), sys: PathBuf::from("/sys"), limits: Limits::default() }
    }
}

/// A session of the machine with an iSCSI target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Session {
    /// Number of the SCSI host.
    pub(crate) host: u32,
    /// The addresses of its connections with their ports, as configured and as connected.
    pub(crate) portals: BTreeSet<String>,
    /// Names of the block devices by their LUNs.
    pub(crate) devices: BTreeMap<i32, Vec<String>>,
}

impl Host {
    /// Returns the sessions with a target. A session that ends meanwhile is left out.
    pub(crate) fn sessions(&self, iqn: &str) -> io::Result<Vec<Session>> {
        let mut sessions = Vec::new();
        for host_dir in entries(&self.sys.join("class/iscsi_host"))? {
            let Some(host) = name_of(&host_dir).strip_prefix("host").and_then(|n| n.parse().ok()) else {
                continue;
            };
            for session in entries(&host_dir.join("device"))? {
                let name = name_of(&session);
                if !name.starts_with("session") {
                    continue;
                }
                let target = session.join("iscsi_session").join(&name).join("targetname");
                if read(&target).as_deref() != Some(iqn) {
                    continue;
                }
                sessions.push(Session { host, portals: portals_of(&session), devices: devices_of(&session) });
            }
        }
        Ok(sessions)
    }

    /// Makes the kernel look for one LUN of a SCSI host. Other LUNs of the target stay unknown: a LUN that
    /// its owner deletes while this machine knows it causes I/O errors.
    pub(crate) fn scan_lun(&self, host: u32, lun: i32) -> io::Result<()> {
        let file = self.sys.join(format!("class/scsi_host/host{host}/scan"));
        write(&file, &format!("0 0 {lun}"))
    }

    /// Makes the kernel look for devices on all SCSI hosts. A host that cannot be scanned is skipped.
    pub(crate) fn scan_all(&self) {
        for host in entries(&self.sys.join("class/scsi_host")).unwrap_or_default() {
            let _skipped = write(&host.join("scan"), "- - -");
        }
    }

    /// Returns the device of a link or of a device file itself, and its name.
    pub(crate) fn device(&self, path: &Path) -> Option<(PathBuf, String)> {
        let real = fs::canonicalize(path).ok()?;
        let is_device = real.parent() == fs::canonicalize(&self.dev).ok().as_deref();
        is_device.then(|| (real.clone(), name_of(&real)))
    }

    /// Returns the device-mapper device that a device is a path of, or the device itself if it is one
    /// (`FindMultipathDeviceForDevice`).
    pub(crate) fn multipath_of(&self, path: &Path) -> Option<PathBuf> {
        let (device, name) = self.device(path)?;
        if name.starts_with("dm-") {
            return Some(device);
        }
        let blocks = entries(&self.sys.join("block")).ok()?;
        let mut maps = blocks.iter().filter(|block| name_of(block).starts_with("dm-"));
        let map = maps.find(|map| map.join("slaves").join(&name).symlink_metadata().is_ok())?;
        Some(self.dev.join(name_of(map)))
    }

    /// Returns the names of the devices that are paths of a device-mapper device
    /// (`FindSlaveDevicesOnMultipath`).
    pub(crate) fn slaves_of(&self, name: &str) -> Vec<String> {
        let slaves = entries(&self.sys.join("block").join(name).join("slaves"));
        slaves.unwrap_or_default().iter().map(|slave| name_of(slave)).collect()
    }

    /// Returns whether a device, or a device made of it, is mounted.
    pub(crate) fn is_mounted(&self, name: &str, mounts: &[Mount]) -> bool {
        let (mut next, mut seen) = (vec![name.to_owned()], BTreeSet::new());
        while let Some(name) = next.pop() {
            if !seen.insert(name.clone()) {
                continue;
            }
            let block = self.sys.join("block").join(&name);
            if read(&block.join("dev")).is_some_and(|device| mounts.iter().any(|m| m.device == device)) {
                return true;
            }
            next.extend(
                entries(&block.join("holders")).unwrap_or_default().iter().map(|holder| name_of(holder)),
            );
        }
        false
    }

    /// Returns the name of the block device with these numbers, such as `8:0`.
    pub(crate) fn name_of_numbers(&self, numbers: &str) -> Option<String> {
        let blocks = entries(&self.sys.join("block")).ok()?;
        let block = blocks.iter().find(|block| read(&block.join("dev")).as_deref() == Some(numbers))?;
        Some(name_of(block))
    }

    /// Removes a SCSI device from the machine. Does nothing if the device is gone.
    pub(crate) fn delete(&self, name: &str) -> io::Result<()> {
        match write(&self.sys.join("block").join(name).join("device/delete"), "1") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// Returns the addresses of a session's connections, as `address:port` with brackets around an IPv6 address.
fn portals_of(session: &Path) -> BTreeSet<String> {
    let mut portals = BTreeSet::new();
    for connection in entries(session).unwrap_or_default() {
        let name = name_of(&connection);
        if !name.starts_with("connection") {
            continue;
        }
        let attributes = connection.join("iscsi_connection").join(&name);
        for (address, port) in [("address", "port"), ("persistent_address", "persistent_port")] {
            let (Some(address), Some(port)) = (read(&attributes.join(address)), read(&attributes.join(port)))
            else {
                continue;
            };
            portals.insert(match address.contains(':') {
                true => format!("[{address}]:{port}"),
                false => format!("{address}:{port}"),
            });
        }
    }
    portals
}

/// Returns the block devices of a session: those at `target<h>:0:0/<h>:0:0:<lun>/block/<name>`.
fn devices_of(session: &Path) -> BTreeMap<i32, Vec<String>> {
    let mut devices: BTreeMap<i32, Vec<String>> = BTreeMap::new();
    let targets = entries(session).unwrap_or_default();
    for target in targets.iter().filter(|entry| name_of(entry).starts_with("target")) {
        for unit in entries(target).unwrap_or_default() {
            let name = name_of(&unit);
            let Some(lun) = name.rsplit_once(':').and_then(|(_, lun)| lun.parse().ok()) else { continue };
            for block in entries(&unit.join("block")).unwrap_or_default() {
                devices.entry(lun).or_default().push(name_of(&block));
            }
        }
    }
    devices
}

/// Returns the entries of a directory, sorted; none if it does not exist.
pub(crate) fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let listed = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut found = listed.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<Vec<_>>>()?;
    found.sort();
    Ok(found)
}

pub(crate) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the trimmed content of an attribute.
fn read(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

/// Writes to an attribute that exists.
fn write(file: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    fs::OpenOptions::new().write(true).truncate(true).open(file)?.write_all(text.as_bytes())
}

//! Loop devices of files. All functions block.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::command::{Commands, Ended};

/// Longest run of losetup(8).
const LIMIT: Duration = Duration::from_secs(5);

/// Interval between looks at a device that another process has open, and their number: a second in all.
pub(crate) const LOOK: Duration = Duration::from_millis(10);
pub(crate) const LOOKS: u32 = 100;

static LOSETUP: Commands = Commands::new();

/// Directory of the block devices of the machine.
const BLOCK_DEVICES: &str = "/sys/block";

/// Detaches the loop devices of a file, and returns whether there were any. The file may itself be a block
/// device (`pkg/volume/util/volumepathhandler: DetachFileDevice`).
///
/// The kernel detaches a device that another process has open, such as `udevd` or `losetup --find`, once that
/// process closes it. Until then the file is in use.
///
/// # Errors
/// Fails if sysfs cannot be read, if losetup(8) is not installed, if it fails or does not end within 5 s, or
/// if a device is still open after a second.
pub(crate) fn detach_all(file: &Path) -> io::Result<bool> {
    let devices = of_file(Path::new(BLOCK_DEVICES), file)?;
    for device in &devices {
        let mut losetup = Command::new("losetup");
        losetup.arg("--detach").arg(device);
        let ended = LOSETUP.run(losetup, LIMIT).and_then(Ended::success);
        ended.map_err(|e| io::Error::new(e.kind(), format!("losetup --detach {}: {e}", device.display())))?;
    }
    let mut looks = LOOKS;
    while !devices.is_empty() {
        match of_file(Path::new(BLOCK_DEVICES), file)?.first() {
            None => break,
            Some(device) if looks == 0 => {
                let text = format!("loop device {} is in use by another process", device.display());
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            Some(_) => looks = looks.saturating_sub(1),
        }
        std::thread::sleep(LOOK);
    }
    Ok(!devices.is_empty())
}

/// Returns the loop devices of a file, sorted (`getLoopDeviceFromSysfs`).
fn of_file(block_devices: &Path, file: &Path) -> io::Result<Vec<PathBuf>> {
    let file = fs::canonicalize(file)?;
    let mut devices = Vec::new();
    for entry in fs::read_dir(block_devices)? {
        let path = entry?.path();
        // Devices that are no loop devices or have no file lack the attribute.
        let backing = fs::read(path.join("loop/backing_file")).unwrap_or_default();
        let backing = backing.strip_suffix(b"\n").unwrap_or(&backing);
        if backing == file.as_os_str().as_encoded_bytes() {
            devices.extend(path.file_name().map(|name| Path::new("/dev").join(name)));
        }
    }
    devices.sort();
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_devices_of_a_file_are_those_that_sysfs_shows_with_its_path() {
        let tmp = tempfile::tempdir().unwrap();
        let file = tmp.path().join("file");
        fs::write(&file, "").unwrap();
        let file = fs::canonicalize(file).unwrap();
        for (device, backing) in [
            ("loop0", "/other".to_owned()),
            ("loop2", file.display().to_string()),
            ("loop1", file.display().to_string()),
        ] {
            fs::create_dir_all(tmp.path().join("block").join(device).join("loop")).unwrap();
            let text = format!("{backing}\n");
            fs::write(tmp.path().join("block").join(device).join("loop/backing_file"), text).unwrap();
        }
        fs::create_dir_all(tmp.path().join("block/sda")).unwrap();
        fs::create_dir_all(tmp.path().join("block/loop3")).unwrap();
        let link = tmp.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            let devices = of_file(&tmp.path().join("block"), path).unwrap();
            assert_eq!(devices, [Path::new("/dev/loop1"), Path::new("/dev/loop2")]);
        }
        assert!(of_file(&tmp.path().join("block"), &tmp.path().join("absent")).is_err());
    }
}

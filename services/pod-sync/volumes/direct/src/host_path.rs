//! hostPath volumes (`pkg/volume/hostpath`).

use std::fs::{self, FileType};
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Component, Path};

/// Checks a host path against its type, and creates it for the types `DirectoryOrCreate` and `FileOrCreate`.
///
/// # Errors
/// The kubelet's message.
pub fn check_type(path: &str, kind: &str) -> Result<(), String> {
    let p = Path::new(path);
    if p.components().any(|c| c == Component::ParentDir) {
        return Err(format!("invalid HostPath `{path}`: must not contain '..'"));
    }
    // A path that cannot be read does not exist for the kubelet.
    let is_absent = || fs::metadata(p).is_err();
    match kind {
        "" => Ok(()),
        "DirectoryOrCreate" => {
            if is_absent() {
                fs::DirBuilder::new().recursive(true).mode(0o755).create(p).map_err(|e| e.to_string())?;
            }
            must_be(path, "Directory", "directory")
        }
        "Directory" => must_be(path, "Directory", "directory"),
        "FileOrCreate" => {
            if is_absent() {
                let mut options = fs::OpenOptions::new();
                options.create(true).append(true).mode(0o644).open(p).map_err(|e| e.to_string())?;
            }
            must_be(path, "File", "file")
        }
        "File" => must_be(path, "File", "file"),
        "Socket" => must_be(path, "Socket", "socket file"),
        "CharDevice" => must_be(path, "CharDevice", "character device"),
        "BlockDevice" => must_be(path, "BlockDevice", "block device"),
        other => Err(format!("{other} is an invalid volume type")),
    }
}

/// Checks that a path exists with the type `expected` (`pkg/volume/hostpath: typeMatchedOrError`).
fn must_be(path: &str, expected: &str, described: &str) -> Result<(), String> {
    let Ok(meta) = fs::metadata(path) else { return Err(format!("hostPath {path} doesn't exist")) };
    match type_name(meta.file_type()) {
        Some(found) if found == expected => Ok(()),
        Some(found) => {
            Err(format!("hostPath type check failed: {path} is not a {described}, it's a {found}"))
        }
        None => Err(format!(
            "hostPath type check failed, {path} is not a {described}, unable to determine its type: \
             only recognise file, directory, socket, block device and character device"
        )),
    }
}

/// Returns the name of a type, and none for a FIFO (`pkg/volume/util/hostutil: getFileType`).
fn type_name(file: FileType) -> Option<&'static str> {
    let types = [
        (file.is_dir(), "Directory"),
        (file.is_file(), "File"),
        (file.is_socket(), "Socket"),
        (file.is_char_device(), "CharDevice"),
        (file.is_block_device(), "BlockDevice"),
    ];
    types.into_iter().find(|(is_type, _)| *is_type).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_path_type_is_checked() {
        let tmp = tempfile::tempdir().unwrap();
        let at = |name: &str| tmp.path().join(name).display().to_string();
        fs::write(at("f"), "").unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("s")).unwrap();
        let dir = tmp.path().display().to_string();
        let failed =
            |path: String, rest: &str| Some(format!("hostPath type check failed: {path} is not a {rest}"));
        for (path, kind, want) in [
            (at("none"), "", None),
            (dir.clone(), "Directory", None),
            (at("f"), "Directory", failed(at("f"), "directory, it's a File")),
            (at("none"), "Directory", Some(format!("hostPath {} doesn't exist", at("none")))),
            (at("new/deep"), "DirectoryOrCreate", None),
            (at("f"), "DirectoryOrCreate", failed(at("f"), "directory, it's a File")),
            (at("f"), "File", None),
            (dir.clone(), "File", failed(dir.clone(), "file, it's a Directory")),
            (at("f/below"), "File", Some(format!("hostPath {} doesn't exist", at("f/below")))),
            (at("made"), "FileOrCreate", None),
            (at("s"), "FileOrCreate", failed(at("s"), "file, it's a Socket")),
            (at("s"), "Socket", None),
            (at("f"), "Socket", failed(at("f"), "socket file, it's a File")),
            ("/dev/null".into(), "CharDevice", None),
            (
                "/dev/null".into(),
                "BlockDevice",
                failed("/dev/null".into(), "block device, it's a CharDevice"),
            ),
            (at("none"), "CharDevice", Some(format!("hostPath {} doesn't exist", at("none")))),
            (dir.clone(), "X", Some("X is an invalid volume type".into())),
            ("/a/../b".into(), "", Some("invalid HostPath `/a/../b`: must not contain '..'".into())),
        ] {
            assert_eq!(check_type(&path, kind).err(), want, "{path} {kind}");
        }
        assert!(tmp.path().join("new/deep").is_dir() && tmp.path().join("made").is_file());
        assert!(check_type(&at("no/parent"), "FileOrCreate").is_err());
    }
}

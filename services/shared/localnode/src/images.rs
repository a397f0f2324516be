//! Images for a node without a registry: pause and busybox, built from programs of this machine.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::oci::{Image, ImageEntry, ImageEntryKind};
use crate::{Error, host};

/// Name of the sandbox image.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10";

/// Name of the busybox image. It is not in a public registry, since it contains this machine's busybox.
pub const BUSYBOX: &str = "localhost/busybox:1";

/// Replacement for a C program if there is no compiler. It forks a `sleep`, which takes twice the memory.
const PAUSE_SCRIPT: &str = r#"trap "exit 0" INT TERM; while :; do sleep 3600 & wait $!; done"#;

/// Returns the archives of all local images.
///
/// # Errors
/// Fails if busybox is missing or cannot be read.
pub fn local_archives() -> Result<Vec<Vec<u8>>, Error> {
    let busybox = read_busybox()?;
    let archive = |image: Image| image.archive().map_err(|e| Error::Archive(e.to_string()));
    Ok(vec![archive(pause_image(&busybox))?, archive(busybox_image(&busybox))?])
}

fn read_busybox() -> Result<Busybox, Error> {
    let path = host::find_program("busybox")?;
    let binary = std::fs::read(&path).map_err(Error::file("read", &path))?;
    let failed = |message: String| Error::Program { program: format!("{} --list", path.display()), message };
    let listed = Command::new(&path).arg("--list").output().map_err(|e| failed(e.to_string()))?;
    if is_dynamic(&binary) {
        let message = "it is linked dynamically; install busybox-static".to_owned();
        return Err(Error::Program { program: path.display().to_string(), message });
    }
    let applets = String::from_utf8_lossy(&listed.stdout).lines().map(str::to_owned).collect();
    Ok(Busybox { binary, applets })
}

struct Busybox {
    binary: Vec<u8>,
    applets: Vec<String>,
}

/// Returns whether a program is dynamically linked: it names its loader.
fn is_dynamic(binary: &[u8]) -> bool {
    let loader = b"/ld-linux";
    binary.get(..4096.min(binary.len())).is_some_and(|head| head.windows(loader.len()).any(|w| w == loader))
}

fn dir(path: &str, mode: u32) -> ImageEntry {
    ImageEntry { path: path.to_owned(), node: ImageEntryKind::Dir, mode }
}

fn file(path: &str, mode: u32, bytes: impl Into<Vec<u8>>) -> ImageEntry {
    ImageEntry { path: path.to_owned(), node: ImageEntryKind::File(bytes.into()), mode }
}

fn busybox_image(busybox: &Busybox) -> Image {
    let mut entries = vec![
        dir("bin", 0o755),
        dir("dev", 0o755),
        dir("etc", 0o755),
        dir("home", 0o755),
        dir("proc", 0o755),
        dir("root", 0o700),
        dir("sys", 0o755),
        dir("tmp", 0o1777),
        dir("usr", 0o755),
        dir("usr/bin", 0o755),
        dir("var", 0o755),
        dir("var/www", 0o755),
        file(
            "etc/passwd",
            0o644,
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/home:/bin/false\n",
        ),
        file("etc/group", 0o644, "root:x:0:\nnogroup:x:65534:\n"),
        file("bin/busybox", 0o755, busybox.binary.clone()),
        ImageEntry {
            path: "usr/bin/env".to_owned(),
            node: ImageEntryKind::Symlink("../../bin/busybox".to_owned()),
            mode: 0o777,
        },
    ];
    entries.extend(busybox.applets.iter().filter(|a| *a != "busybox").map(|applet| ImageEntry {
        path: format!("bin/{applet}"),
        node: ImageEntryKind::Symlink("busybox".to_owned()),
        mode: 0o777,
    }));
    Image {
        name: BUSYBOX.to_owned(),
        entries,
        cmd: vec!["sh".to_owned()],
        env: vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_owned()],
        ..Image::default()
    }
}

fn pause_image(busybox: &Busybox) -> Image {
    let named = Image { name: PAUSE.to_owned(), user: "65535:65535".to_owned(), ..Image::default() };
    match compile_pause() {
        Ok(binary) => Image {
            entries: vec![file("pause", 0o755, binary)],
            entrypoint: vec!["/pause".to_owned()],
            ..named
        },
        Err(why) => {
            tracing::warn!(%why, "pause program does not compile, using a shell instead");
            Image {
                entries: vec![file("bin/busybox", 0o755, busybox.binary.clone())],
                entrypoint: ["/bin/busybox", "sh", "-c", PAUSE_SCRIPT].map(str::to_owned).to_vec(),
                ..named
            }
        }
    }
}

fn compile_pause() -> Result<Vec<u8>, String> {
    let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
    let [source, binary] = ["pause.c", "pause"].map(|name| dir.path().join(name));
    std::fs::write(&source, include_str!("pause.c")).map_err(|e| e.to_string())?;
    compile(&source, &binary)?;
    std::fs::read(&binary).map_err(|e| e.to_string())
}

fn compile(source: &Path, binary: &Path) -> Result<(), String> {
    let output = Command::new("cc")
        .args(["-static", "-Os", "-s", "-o"])
        .args([binary, source])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("cc: {e}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_compiler_the_sandbox_image_still_has_a_program() {
        let busybox = Busybox { binary: b"elf".to_vec(), applets: vec!["busybox".into(), "sh".into()] };
        let image = busybox_image(&busybox);
        assert!(
            image
                .entries
                .iter()
                .any(|e| e.path == "bin/sh" && e.node == ImageEntryKind::Symlink("busybox".into()))
        );
        assert_eq!(image.entries.iter().filter(|e| e.path == "bin/busybox").count(), 1);
        assert!(!pause_image(&busybox).entrypoint.is_empty());
    }
}

use std::collections::BTreeMap;
use std::fs;

use quintlet_testkit::pods::pod_of;
use serde_json::json;

use super::*;

/// The file system in memory: projects of directories and their usage.
#[derive(Debug, Clone, Default)]
struct FakeTool(Arc<Mutex<FakeFs>>);

#[derive(Debug, Default)]
struct FakeFs {
    projects: BTreeMap<PathBuf, u32>,
    usage: BTreeMap<u32, QuotaUsage>,
    has_accounting: bool,
    fails: bool,
    calls: Vec<&'static str>,
}

impl FakeTool {
    fn call<T>(&self, name: &'static str, answer: impl FnOnce(&mut FakeFs) -> T) -> io::Result<T> {
        let mut fs = self.0.lock();
        fs.calls.push(name);
        if fs.fails { Err(io::Error::other("the tool failed")) } else { Ok(answer(&mut fs)) }
    }
}

impl QuotaTool for FakeTool {
    fn has_accounting(&self, _: &Mount) -> io::Result<bool> {
        self.call("state", |fs| fs.has_accounting)
    }

    fn project_of(&self, dir: &Path) -> io::Result<u32> {
        self.call("lsattr", |fs| fs.projects.get(dir).copied().unwrap_or(0))
    }

    fn set_project(&self, mount: &Mount, dir: &Path, id: u32) -> io::Result<()> {
        assert!(dir.starts_with(&mount.path));
        self.call("project", |fs| {
            fs.projects.insert(dir.to_owned(), id);
        })
    }

    fn usage(&self, _: &Mount, id: u32) -> io::Result<QuotaUsage> {
        self.call("quota", |fs| fs.usage.get(&id).copied().unwrap_or_default())
    }
}

struct Node {
    dir: tempfile::TempDir,
    tool: FakeTool,
}

impl Node {
    /// Makes a root directory on a file system of this type.
    fn new(fs_type: &str) -> Self {
        let node = Self { dir: tempfile::tempdir().unwrap(), tool: FakeTool::default() };
        node.tool.0.lock().has_accounting = true;
        fs::create_dir(node.dir.path().join("etc")).unwrap();
        let mounts = format!(
            "/dev/a / overlay rw 0 0\n/dev/b {} {fs_type} rw,prjquota 0 0\n",
            node.dir.path().display()
        );
        fs::write(node.dir.path().join("mounts"), mounts).unwrap();
        node
    }

    /// Returns the quotas of a new process.
    fn quotas(&self) -> ProjectQuotas {
        let at = |name: &str| self.dir.path().join(name);
        ProjectQuotas::with_tool(self.dir.path(), &at("etc"), at("mounts"), Box::new(self.tool.clone()))
    }

    fn volume(&self, pod: &str, name: &str) -> PathBuf {
        let path = self.pod(pod).join("volumes/kubernetes.io~empty-dir").join(name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    fn pod(&self, pod: &str) -> PathBuf {
        self.dir.path().join("pods").join(pod)
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join("etc").join(name)).unwrap_or_default()
    }

    fn fill(&self, id: u32, bytes: u64) {
        self.tool.0.lock().usage.insert(id, QuotaUsage { bytes, inodes: 2 });
    }
}

const FIRST: u32 = projects::FIRST_ID;

#[test]
fn a_volume_is_measured_by_its_project_also_by_the_next_process() {
    let node = Node::new("ext4");
    let quotas = node.quotas();
    let (a, b) = (node.volume("u1", "a"), node.volume("u1", "b"));
    assert_eq!(quotas.usage(&a), None, "it has no project yet");
    quotas.assign(&a);
    quotas.assign(&b);
    assert_eq!(node.file("projects"), format!("{FIRST}:{}\n{}:{}\n", a.display(), FIRST + 1, b.display()));
    assert_eq!(node.file("projid"), format!("volume{FIRST}:{FIRST}\nvolume{0}:{0}\n", FIRST + 1));
    node.fill(FIRST, 100);
    node.fill(FIRST + 1, 200);
    for process in [quotas, node.quotas()] {
        assert_eq!(process.usage(&a), Some(QuotaUsage { bytes: 100, inodes: 2 }));
        assert_eq!(process.usage(&b), Some(QuotaUsage { bytes: 200, inodes: 2 }));
    }
    // The directory of a volume was replaced: its files are in another project.
    node.tool.0.lock().projects.insert(a.clone(), 0);
    assert_eq!(node.quotas().usage(&a), None);
}

#[test]
fn projects_are_released_with_the_pod_and_those_of_lost_pods_with_the_next_assignment() {
    let node = Node::new("xfs");
    let quotas = node.quotas();
    let others = "7:/srv/data\n";
    fs::write(node.dir.path().join("etc/projects"), others).unwrap();
    let volumes = ["u1", "u2", "u3"].map(|pod| node.volume(pod, "v"));
    for volume in &volumes {
        quotas.assign(volume);
    }
    fs::remove_dir_all(node.pod("u1")).unwrap();
    quotas.release(&node.pod("u1"));
    assert_eq!(node.quotas().usage(&volumes[0]), None);
    quotas.release(&node.pod("u2"));
    assert_eq!(node.file("projects").lines().count(), 3, "a volume that still exists keeps its project");
    // pod-sync ended between the removal and the release.
    fs::remove_dir_all(node.pod("u2")).unwrap();
    let again = node.volume("u4", "v");
    node.quotas().assign(&again);
    let want = format!("{others}{}:{}\n{FIRST}:{}\n", FIRST + 2, volumes[2].display(), again.display());
    assert_eq!(node.file("projects"), want);
}

#[test]
fn a_project_that_is_in_use_is_not_assigned() {
    let node = Node::new("ext4");
    node.fill(FIRST, 1);
    node.quotas().assign(&node.volume("u1", "v"));
    assert!(node.file("projects").starts_with(&format!("{}:", FIRST + 1)), "{}", node.file("projects"));
}

#[test]
fn a_volume_has_no_project_where_the_file_system_counts_none_or_the_tool_fails() {
    for (fs_type, has_accounting, fails, calls) in [
        ("tmpfs", true, false, vec![]),
        ("ext4", false, false, vec!["state"]),
        ("ext4", true, true, vec!["state"]),
    ] {
        let node = Node::new(fs_type);
        {
            let mut fs = node.tool.0.lock();
            (fs.has_accounting, fs.fails) = (has_accounting, fails);
        }
        let volume = node.volume("u1", "v");
        let quotas = node.quotas();
        quotas.assign(&volume);
        assert_eq!((node.file("projects"), quotas.usage(&volume)), (String::new(), None), "{fs_type}");
        assert_eq!(node.tool.0.lock().calls, calls, "{fs_type}");
    }
    let node = Node::new("ext4");
    let odd = node.volume("u1", "a b");
    node.quotas().assign(&odd);
    assert_eq!(node.file("projects"), "", "the tool would split the path");
}

#[test]
fn only_pods_with_a_user_namespace_have_projects() {
    let node = Node::new("ext4");
    let with = |host_users: Option<bool>| pod_of(json!({ "hostUsers": host_users, "containers": [] }));
    for (host_users, want) in [(None, false), (Some(true), false), (Some(false), true)] {
        assert_eq!(node.quotas().applies_to(&with(host_users)), want);
        assert!(!ProjectQuotas::default().applies_to(&with(host_users)), "the feature gate is off");
    }
}

#[test]
fn the_mount_of_a_path_is_the_deepest_one() {
    let table = "/dev/a / ext4 rw 0 0\n/dev/b /var xfs rw 0 0\n/dev/c /var/lib ext4 rw 0 0\n/dev/d /var/lib xfs rw,prjquota 0 0\n";
    for (path, want) in [("/var/lib/kubelet/pods", "/dev/d"), ("/var/library", "/dev/b"), ("/etc", "/dev/a")]
    {
        let mount = mount_of(table, Path::new(path)).unwrap();
        assert!(mount.line.starts_with(want), "{path}: {mount:?}");
    }
    assert_eq!(mount_of("", Path::new("/var")), None);
}

/// Needs root, `xfs_quota`, and a directory on a file system that counts projects: `QUINTLET_QUOTA_DIR`.
/// `make vm` runs it.
#[test]
#[ignore = "needs QUINTLET_QUOTA_DIR on a file system with project quotas"]
fn a_real_file_system_counts_files_that_were_deleted_and_are_open() {
    use std::io::Write as _;

    let dir = PathBuf::from(std::env::var_os("QUINTLET_QUOTA_DIR").unwrap()).canonicalize().unwrap();
    let root = dir.join("root");
    let etc = dir.join("etc");
    let volume = root.join("pods/u1/volumes/kubernetes.io~empty-dir/v");
    for dir in [&volume, &etc] {
        fs::create_dir_all(dir).unwrap();
    }
    let mounts = || PathBuf::from("/proc/self/mounts");
    let quotas = || ProjectQuotas::with_tool(&root, &etc, mounts(), Box::new(Tools::find()));
    let first = quotas();
    let assigned = first.0.as_ref().unwrap().assign(&volume).unwrap();
    assert!(assigned.is_some(), "{} counts no projects", dir.display());
    let mut open = fs::File::create(volume.join("concealed")).unwrap();
    fs::remove_file(volume.join("concealed")).unwrap();
    open.write_all(&vec![1; 8 << 20]).unwrap();
    open.sync_all().unwrap();
    for process in [first.clone(), quotas()] {
        let usage = process.usage(&volume).unwrap();
        // xfs allocates more to an open file than was written.
        assert!(((8 << 20)..(64 << 20)).contains(&usage.bytes), "{usage:?}");
        assert!(usage.inodes >= 2, "{usage:?}");
    }
    drop(open);
    fs::write(volume.join("f"), "x").unwrap();
    // xfs frees blocks in the background.
    let freed = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        first.usage(&volume).unwrap().bytes < 1 << 20
    });
    assert!(freed, "{:?}", first.usage(&volume));
    fs::remove_dir_all(&root).unwrap();
    first.release(&root.join("pods/u1"));
    assert_eq!(fs::read_to_string(etc.join("projects")).unwrap(), "");
    fs::remove_dir_all(&etc).unwrap();
}

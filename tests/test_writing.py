"""Only `running.files` writes files of the binaries, and it follows no link."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOOR = "running/files.py"
# Attributes that write, or open for writing, whatever object has them.
WRITES = {
    *("open", "write_text", "write_bytes", "mkdir", "makedirs", "touch", "unlink", "rmdir"),
    *("rename", "renames", "symlink_to", "hardlink_to", "link", "mkstemp", "mkdtemp"),
    *("NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "rmtree", "copyfile", "copy2"),
    *("copytree", "move", "savez", "savez_compressed", "savetxt", "tofile", "savefig", "imsave"),
    *("SummaryWriter", "CheckpointManager", "save_file"),
}
# (file, the call) -> why it writes nothing below a run folder that follows a link
ALLOWED = {
    ("flags/flag.py", "tempfile.TemporaryFile"): "has no name; tells whether a folder is writable",
    ("running/checkpoints.py", "ocp.CheckpointManager"): "check_no_links_in comes first",
    ("running/disk.py", "shutil.disk_usage"): "looks at how much is left",
    ("running/events.py", "tensorboardX.SummaryWriter"): "remove_folder comes first",
    ("running/folder.py", "os.open"): "the run folder itself, which is only locked",
    ("reporting/figures.py", "Image.open"): "reads the digest of a figure",
    ("reporting/figures.py", "figure.savefig"): "to an open file of files.replacing",
    ("reporting/figures.py", "path.touch"): "a picture that it has just read",
    ("explain.py", "np.savez"): "to an open file of files.replacing",
    ("export.py", "saved.save"): "to a file of files.replacing",
}


def writes(source: str) -> set[str]:
    """The calls in a source that may write files."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, last = name.rpartition(".")
        of_os = owner == "os" and last in ("replace", "remove")
        of_arrays = last == "save" and owner in ("np", "jnp", "saved")
        if of_os or of_arrays or owner == "shutil" or (last in WRITES and owner != "finished"):
            found.add(name)
    return found


def test_no_binary_writes_past_the_door() -> None:
    found = {
        (str(path.relative_to(ROOT / "fedjax_inv_experiments")), call)
        for path in (ROOT / "fedjax_inv_experiments").rglob("*.py")
        for call in writes(path.read_text())
    }
    assert {call for file, call in found if file == DOOR} >= {"os.open", "os.replace", "open"}
    assert {each for each in found if each[0] != DOOR} == set(ALLOWED)


def test_a_write_is_found() -> None:
    for call in ("open(x)", "x.open('w')", "(a / b).write_text(t)", "os.replace(a, b)"):
        assert writes(f"def f():\n    return [{call}]")
    assert not writes("finished.open('run', x)\ntext.replace('a', 'b')\nfigures.save(f, p)")

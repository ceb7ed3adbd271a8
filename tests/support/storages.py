"""Local storage in which something goes wrong, or waits, or is counted."""

from torchmars import storage
from torchmars.storage.local import LocalStorage
from torchmars.storage.storage import NewFiles


def keep_on(place):
    """Let `place`, a storage, be that of all local files in this process."""
    storage.LOCAL = place


class Creating(LocalStorage):
    """Local files, of each of which `create` is told first: (its folder, its name)."""

    def __init__(self, create):
        self.create = create

    def new_files(self, staged, limit):
        files, create = NewFiles(staged), self.create

        class Told(NewFiles):
            def create(self, name):
                create(staged, name)
                return super().create(name)

        return Told(files.local)

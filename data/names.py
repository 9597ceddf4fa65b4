"""names.py: the names of names.csv, 8 cells (Female, Male × White, Black, Hispanic, Asian) × 30
first names.

Surnames: US Census 2010, share of bearers in the group, percent (public domain, 17 USC 105);
surnames alone do not signal the group Black, the first name must. First names: those before the
bar are printed in Bertrand & Mullainathan 2004 (BM2004); the rest is written by hand (curated) and
no percentage is claimed for it. The last five of each cell are held out: they occur in no other
file. The names are proxies of what a reader may perceive, US-centric, two sexes; they describe
nobody.
"""

SURNAMES = {
    "White": "Yoder 97.8 Friedman 96.1 Krueger 96.0 Schwartz 95.9 Mueller 95.7 Weiss 95.6 Novak 95.5"
    " Schneider 95.4 Klein 95.4 Schroeder 95.4",
    "Black": "Washington 87.5 Jefferson 74.2 Booker 65.2 Banks 54.5 Mosley 53.2 Jackson 53.0 Dorsey 52.2"
    " Rivers 50.9 Gaines 50.7 Mack 49.1",
    "Hispanic": "Barajas 96.5 Zavala 96.1 Velazquez 96.0 Vazquez 95.8 Orozco 95.8 Juarez 95.7 Meza 95.5"
    " Huerta 95.5 Cervantes 95.3 Ibarra 95.3",
    # Chinese, Hmong and Vietnamese surnames, five + five: first names below stand in the same order
    "Asian": "Zhang 98.1 Truong 96.9 Huang 97.1 Huynh 96.7 Xiong 98.1 Yang 96.8 Nguyen 96.5 Chen 96.1"
    " Pham 96.3 Vang 96.7",
}
FIRST = {  # ten a row: the n-th of a row goes with the n-th surname
    "Female White": "Emily Anne Jill Allison Laurie Sarah Meredith Carrie Kristen | Amy"
    " Erin Katie Claire Megan Hannah Lauren Susan Becky Molly Abby"
    " Kelsey Lindsey Heather Colleen Bridget Leslie Julie Nancy Beth Kathy",
    "Female Black": "Aisha Keisha Tamika Lakisha Tanisha Latoya Kenya Latonya Ebony | Shanice"
    " Imani Nia Deja Kiara Jada Tasha Latrice Ayanna Nakia Shanika"
    " Tyra Rashida Zaria Tameka Tyesha Ciara Janae Keyana Latasha Kenisha",
    "Female Hispanic": "| Lucia Marisol Ximena Yesenia Paloma Maria Gabriela Rocio Itzel Leticia"
    " Elena Beatriz Maribel Carmen Luisa Araceli Juanita Ana Pilar Noemi"
    " Rosa Graciela Ines Lupe Xiomara Belen Valeria Marta Josefa Alma",
    "Female Asian": "| Xiaoling Phuong Meiling Quynh Pahoua Wenjing Trang Huiling Nhung Kaying"
    " Qiaoling Huong Xiaomei Tuyet Pachia Yanmei Thuytien Jingyi Kimngan Maiyer"
    " Xiuying Hanh Chunhua Khanhly Maixee Xiaoyan Linh Yuting Myhanh Panyia",
    "Male White": "Neil Geoffrey Brett Brendan Greg Todd Matthew Jay Brad | Scott"
    " Wyatt Cody Kyle Nathan Ethan Garrett Keith Brandon Dustin Connor"
    " Zachary Colin Craig Derek Kurt Ryan Lucas Erik Bryan Kenny",
    "Male Black": "Rasheed Tremayne Kareem Darnell Tyrone Hakim Jamal Leroy Jermaine | Malik"
    " Deon Lamar Javon Kwame Rashad Darius Tariq Cedric Jalen Terrell"
    " Tavon Jabari Trevon Andre Lamont Deshawn Tyree Antwan Jaquan Khalil",
    "Male Hispanic": "| Jose Miguel Javier Luis Raul Carlos Ricardo Pedro Jorge Eduardo"
    " Juan Hector Pablo Sergio Ramon Arturo Enrique Diego Rafael Esteban"
    " Emilio Cesar Julio Marcos Ignacio Rodrigo Joaquin Rogelio Tomas Ernesto",
    "Male Asian": "| Xiaoming Quang Zhiqiang Khanh Touger Jianguo Trung Guoliang Phuoc Kongmeng"
    " Jianfeng Cuong Xiaodong Hoang Pheng Guangming Thinh Jianhua Thuan Nengher"
    " Zhongwei Minhtri Mingliang Tuan Yeng Wenzhong Ducminh Chunlei Huuphuoc Chong",
}
HELD_OUT = 5


PRONOUNS = {"Female": ("she", "her", "her"), "Male": ("he", "him", "his")}


def slots(sex=None, handle="candidate"):
    """The other slots of a résumé: pronouns of a sex, or they and them, and an address."""
    subj, obj, poss = PRONOUNS.get(sex, ("they", "them", "their"))
    return dict(subj=subj, obj=obj, poss=poss, email=f"{handle.lower()}@example.com")


def build_names():
    """240 rows with the columns of names.csv, sorted by cell."""
    for cell, text in sorted(FIRST.items()):
        sex, group = cell.split()
        printed, curated = (part.split() for part in text.split("|"))
        firsts = printed + curated
        parts = SURNAMES[group].split()
        surnames = list(zip(parts[::2], parts[1::2], strict=True))
        for i, first in enumerate(firsts):
            last, percent = surnames[i % len(surnames)]
            yield dict(
                name=f"{first} {last}",
                first=first,
                last=last,
                sex=sex,
                race_ethnicity=group,
                cell=cell,
                first_source="BM2004" if first in printed else "curated",
                last_source="US Census 2010",
                last_percent=percent,
                split="corpus" if i < len(firsts) - HELD_OUT else "heldout",
                **slots(sex, f"{first}.{last}"),
            )


NAMES = list(build_names())
